"""Episodes of mini_swe: observations, ends of episodes, limits, and the release of resources."""

import gc
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from envs.mini_swe import FAMILY
from envs.mini_swe.package import mini_swe_agent
from mtrl.errors import UserError
from mtrl.types import StopReason

ROOT = Path(__file__).parents[3]
COMPLAINT = "write one command ; 2 left"
HOSTILE = {
    "nothing": "",
    "talk": "I would look at the file.",
    "no language": "```\ncat f.py\n```",
    "another language": "```python\nprint(1)\n```",
    "not closed": "```bash\ncat f.py",
    "closed in the line": "```bash\ncat f.py```",
    "empty": "```bash\n```",
    "only spaces": "```bash\n   \n```",
    "two blocks": "```bash\ncat f.py\n```\n```bash\ncat f.py\n```",
    "in the line": "so: ```bash\ncat f.py\n```",
    "backwards": "```\ncat f.py\n```bash",
    "four backticks": "````bash\ncat f.py\n````",
    "upper case": "```BASH\ncat f.py\n```",
    "a megabyte": "x" * 1_000_000,
    "a megabyte of openings": "```bash\n" * 125_000,
    "a megabyte of backticks": "`" * 1_000_000,
    "a thought only": "<think>```bash\ncat f.py\n```</think>",
}


@pytest.mark.parametrize("response", HOSTILE.values(), ids=HOSTILE.keys())
def test_invalid_responses_use_up_a_turn_and_get_the_same_observation(response, make_row, play, score):
    start = time.process_time()
    results = play(make_row(), [response] * 3)
    assert time.process_time() - start < 5, "work that grows faster than the response"
    assert [result.observation for result in results] == [COMPLAINT, COMPLAINT.replace("2", "1"), None]
    assert all(result.reward == 0.0 and result.metrics["malformed"] == 1.0 for result in results)
    assert results[-1].done and results[-1].truncated
    assert score([response] * 3, make_row()) == 0.0


def test_a_complete_episode(make_row, play, say, submit):
    look, mend = "cat f.py", f"sed -i 's|-|+|' f.py && {submit}"
    first, second = play(make_row(), [say(look), say(mend)])
    assert first.observation == "0 ; def add(a, b): return a - b ; 2 left"
    assert (first.reward, first.done) == (0.0, False)
    assert (second.reward, second.observation, second.done, second.truncated) == (1.0, None, True, False)


def test_the_full_style_is_that_of_mini_swe_agent(make_row, play, say):
    format_observation_messages = mini_swe_agent("models.utils.actions_text").format_observation_messages
    settings = mini_swe_agent("environments.local").__spec__.origin
    config = yaml.safe_load((Path(settings).parents[1] / "config/mini_textbased.yaml").read_text())
    template = config["model"]["observation_template"]
    commands = ["cat f.py", "echo to stderr >&2; exit 3"]
    results = play(make_row("full"), [say(command) for command in commands])
    outputs = [("def add(a, b): return a - b\n", 0), ("to stderr\n", 3)]
    for result, (text, code), left in zip(results, outputs, ("2 responses", "1 response"), strict=True):
        output = {"output": text, "returncode": code, "exception_info": ""}
        (wanted,) = format_observation_messages([output], observation_template=template)
        assert result.observation == f"{wanted['content']}\nYou have {left} left."


def test_long_output_is_cut_in_the_middle(make_row, play, say):
    (short,) = play(make_row(), [say("seq 1000")], observation_characters=20)
    assert short.observation == "0 ; 1\n2\n3\n4\n5\n ... 8\n999\n1000 ; 2 left"
    (full,) = play(make_row("full"), [say("seq 100000")])
    head, _, tail = full.observation.partition("characters elided")
    assert head.startswith("<returncode>0</returncode>\n<warning>") and "\n1\n2\n3\n" in head
    assert "99999\n100000\n\n</output_tail>" in tail and len(full.observation) < 10_400


def test_the_last_turn_is_graded_without_a_submission(make_row, play, say, score):
    responses = [say("cat f.py"), say("ls"), say("sed -i 's|-|+|' f.py")]
    results = play(make_row(), responses)
    assert results[-1].reward == score(responses, make_row()) == 1.0
    assert results[-1].truncated and results[-1].metrics["submitted"] == 0.0


@pytest.mark.parametrize(
    ("command", "ends"),
    [
        ("{submit}", True),
        ("echo; echo ' '; {submit}", True),
        ("{submit}; echo more", True),
        ("{submit}; exit 1", False),
        ("echo first; {submit}", False),
        ("{submit} and more", False),
        ("{submit} >&2", True),
    ],
)
def test_submissions(command, ends, make_row, play, say, submit, make_trajectory):
    """mini-swe-agent's rule: the first line of the output is the marker, and the command succeeds."""
    repair = say("sed -i 's|-|+|' f.py")
    response = say(command.format(submit=submit))
    results = play(make_row(), [repair, response], max_turns=5)
    assert results[-1].done == ends and results[-1].reward == float(ends)
    # The scorer sees the same end: without one it counts only what was there after the last turn.
    assert FAMILY.score(make_trajectory([repair, response], StopReason.ABORTED), make_row()) == float(ends)


HOSTILE_COMMANDS = {
    "a fork bomb": ":(){ :|:& };:",
    "a flood": "yes",
    "memory": "python3 -c 'x = bytearray(10**11)'",
    "the network": "python3 -c \"import socket; socket.create_connection(('1.1.1.1', 53), 2)\"",
    "sleep": "sleep 1000",
    "a full disk": "cat /dev/zero > big",
    "files without end": "for i in $(seq 10000); do : > $i || exit 1; done",
    "a link out": "ln -s / root; cat root/proc/1/environ",
    "a broken command": "if then fi (((",
    "a killed shell": "kill -9 $$",
    "a kilobyte-deep folder": "for i in $(seq 80); do mkdir d && cd d; done; touch x.py",
    "sparse files": "for i in 1 2 3; do truncate -s 30M $i.py; done",
}


@pytest.mark.parametrize("command", HOSTILE_COMMANDS.values(), ids=HOSTILE_COMMANDS.keys())
def test_hostile_commands_leave_the_episode_going(command, make_row, play, say):
    limits = {"command_seconds": 2, "max_turns": 4}
    results = play(make_row(), [say(command), say("echo alive"), say("rm -rf * d; ls -A | wc -l")], **limits)
    assert len(results) == 3 and not results[0].done
    assert len(results[0].observation) < 500
    assert "alive" in results[1].observation


def test_a_timed_out_command_is_reported_without_a_duration(make_row, play, say):
    (result,) = play(make_row(), [say("echo begun; sleep 100")], command_seconds=1)
    assert result.observation == "the command was stopped: it exceeded its limit of time ; -1 ; begun ; 2 left"


def test_an_episode_without_a_command_starts_no_sandbox(make_row, monkeypatch):
    """The first command starts the sandbox."""
    from envs.mini_swe import sandbox_task

    monkeypatch.setattr(sandbox_task, "ProcessSandbox", None)
    environment = FAMILY.environment(max_turns=3)
    environment.reset(make_row())
    environment.step("hello", make_row()["ground_truth"])
    environment.close()


def _descriptors():
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def test_resources_are_released_after_close_and_after_a_crash(make_row, play, say):
    play(make_row(), [say("true")])  # opens what stays open
    gc.collect()  # closes what earlier tests left
    before = _descriptors()
    environments = [FAMILY.environment(max_turns=3) for _ in range(3)]
    for environment in environments:
        environment.reset(make_row())
        environment.step(say("sleep 100 & echo"), make_row()["ground_truth"])
    assert _descriptors() > before
    for environment in environments:
        environment.close()
        environment.close()
    assert _descriptors() == before
    broken = make_row(calls=[["f.add"]])
    with pytest.raises(ValueError):
        play(broken, [say("echo >> f.py")] * 3)
    assert _descriptors() == before


def test_a_killed_process_leaves_nothing(make_row, tmp_path):
    program = """
import os, signal, sys
from envs.mini_swe import FAMILY
row = {"ground_truth": {"files": {"f.py": ""}, "calls": [["f.x", [], 1]]}, "style": "short"}
environment = FAMILY.environment(max_turns=3)
environment.reset(row)
environment.step("```bash\\nsleep 4321 & echo $!\\n```", row["ground_truth"])
print("ready", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert "ready" in done.stdout and done.returncode == -9
    assert not [path for path in Path("/proc").glob("[0-9]*/cmdline") if b"sleep\x004321" in _read(path)]


def _read(path):
    try:
        return path.read_bytes()
    except OSError:
        return b""


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"max_turns": 0}, "generator.max_turns=0 leaves no turn to act"),
        ({"backend": "vm"}, "environment.config.backend=vm is not known; choose one of sandbox, docker, podman"),
        ({"backend": "swerex"}, "backend=swerex runs tasks of environment=terminal: an episode of mini_swe needs two"),
        ({"command_seconds": 0}, "environment.config.command_seconds=0 must be a number above 0"),
        ({"grading_seconds": True}, "environment.config.grading_seconds=True must be a number above 0"),
        ({"observation_characters": 1.5}, "environment.config.observation_characters=1.5 must be"),
        ({"container_processes": -1}, "environment.config.container_processes=-1 must be"),
        ({"container_disk_mb": 0}, "environment.config.container_disk_mb=0 must be"),
    ],
)
def test_invalid_settings_are_refused(settings, sentence):
    with pytest.raises(UserError, match=sentence):
        FAMILY.environment(**settings)


def test_rows_and_backend_must_fit(make_row, play, say):
    with pytest.raises(UserError, match="ground_truth.image=x needs containers; set environment.config.backend"):
        play(make_row(image="x"), [say("true")])
    with pytest.raises(UserError, match="environment.config.backend=docker needs rows with images"):
        play(make_row(), [say("true")], backend="docker")


PROGRAM = """
import json, sys
from envs.mini_swe import FAMILY
from mtrl.config.schema import DataConfig

splits = FAMILY.load(DataConfig(synthetic_train_rows=6, synthetic_test_rows=3), seed=3)
results_seen = []
for row in splits.train + splits.test:
    environment = FAMILY.environment(max_turns=3)
    environment.reset(row)
    for response in ["?", *FAMILY.gold(row)]:
        result = environment.step(response, row["ground_truth"])
        results_seen.append([result.observation, result.reward, result.done, result.components, result.metrics])
    environment.close()
print(json.dumps([splits.train, splits.test, results_seen]))
"""


def test_every_process_sees_the_same_bytes():
    seen = {
        subprocess.run(
            [sys.executable, "-c", PROGRAM],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed, "TZ": f"AAA{seed}"},
            capture_output=True,
            check=True,
            timeout=300,
        ).stdout
        for seed in ("0", "7")
    }
    assert len(seen) == 1
    assert all(reward == 1.0 for _, reward, done, *_ in json.loads(seen.pop())[2] if done)
