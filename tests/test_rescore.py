"""Rescoring of stored trajectories: the same settings give the same numbers, and all differences are reported."""

import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import mtrl
from mtrl.command.program import one_sentence
from mtrl.datasets import Splits
from mtrl.play.__main__ import main as play
from mtrl.record.stored import RowFinder, StoredLine
from mtrl.rescore.__main__ import main as rescore
from mtrl.types import Trajectory, read_trajectories, to_json
from tests import forked

ROOT = Path(mtrl.__file__).parent.parent
RUN = ("experiment=gsm8k", "debug=fast", "trainer.max_steps=2", "tracker.plots=false")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a real run of two steps with an untrained policy."""
    folder = tmp_path_factory.mktemp("rescore")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "mtrl.main", *RUN, f"run_dir={folder / 'run'}"]
    done = forked.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return folder / "run"


@pytest.fixture(scope="module")
def demonstrated(tmp_path_factory):
    """A file with right and wrong episodes of the demonstrator, as mtrl.play stores them."""
    file = tmp_path_factory.mktemp("demonstrated") / "demonstrated.jsonl"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", io.StringIO())
        assert play(["+experiment=gsm8k", "player=demonstrator", "episodes=40", f"out={file}"]) == 0
    return file


@pytest.fixture
def found(capsys):
    """Function `found(SOURCE, "key=value", …)` that returns the exit status and the JSON."""

    def run(source, *words):
        status = rescore([str(source), *words, "--json"])
        return status, json.loads(capsys.readouterr().out)

    return run


def stored(source):
    """Return all trajectories by location."""
    files = sorted((source / "trajectories").glob("*.jsonl")) if source.is_dir() else [source]
    return {f"{f.name}:{n}": t for f in files for n, t in enumerate(read_trajectories(f), 1)}


def shown(capsys, *words):
    status = rescore([str(word) for word in words])
    return status, capsys.readouterr().out


def test_the_settings_of_the_run_change_nothing(run, found):
    status, report = found(run)
    before = stored(run)
    assert status == 0 and report["not_rescored"] == [] and report["all"]["changed"] == 0
    assert {line["where"] for line in report["trajectories"]} == before.keys() and len(before) == 32
    for line in report["trajectories"]:
        trajectory = before[line["where"]]
        assert line["rewards_after"] == trajectory.rewards and line["reward_after"] == trajectory.reward
        assert line["score_after"] == trajectory.score == line["score_before"]
    assert {kind: values["episodes"] for kind, values in report["kinds"].items()} == {
        "eval_greedy": 12,
        "eval_sampled": 12,
        "train": 8,
    }


def test_other_components_change_the_reward(run, found):
    status, report = found(run, "reward.components={turn_penalty:0.5}")
    assert status == 0 and report["environment_replayed"]
    before = stored(run)
    for line in report["trajectories"]:
        trajectory = before[line["where"]]
        assert line["reward_after"] == pytest.approx(trajectory.reward - 0.5 * (len(trajectory.turns) - 1))
    assert report["all"]["changed"] == sum(len(t.turns) > 1 for t in before.values()) > 0


def test_another_scheme_changes_the_reward_and_not_the_score(demonstrated, found):
    status, own = found(demonstrated)
    assert status == 0 and own["all"]["changed"] == 0
    assert 0 < own["all"]["success_before"] < 1, "the demonstrator is sometimes right"
    assert [line["rewards_after"] for line in own["trajectories"]] == [t.rewards for t in stored(demonstrated).values()]

    status, other = found(demonstrated, "reward=guide")
    assert status == 0 and other["all"]["changed"] > 0
    assert other["all"]["success_after"] == own["all"]["success_after"]
    for a, b in zip(own["trajectories"], other["trajectories"], strict=True):
        assert (a["where"], a["score_after"]) == (b["where"], b["score_after"])
    rewards = {
        name: [line["reward_after"] for line in report["trajectories"]] for name, report in (("a", own), ("b", other))
    }
    assert rewards["a"] != rewards["b"]


def test_lines_that_are_no_trajectories_are_counted(run, found, tmp_path):
    copy = shutil.copytree(run, tmp_path / "copy")
    file = copy / "trajectories" / "train_step_000001.jsonl"
    first = file.read_text().splitlines()[0]
    bad = [
        first[:-30],
        "[]",
        '{"turns": 3}',
        first.replace('"stop_reason": "', '"stop_reason": "never_'),
        "",
        "no JSON",
    ]
    file.write_bytes(file.read_bytes() + "\n".join(bad).encode() + b"\n\xc3(\n")
    status, report = found(copy)
    left = report["not_rescored"]
    assert status == 1 and report["left_out"] == {"unreadable": 6} and report["all"]["episodes"] == 32
    assert [line["where"] for line in left] == [f"{file.name}:{n}" for n in (5, 6, 7, 8, 10, 11)]
    assert all(line["message"] for line in left)


def test_a_changed_observation_is_reported_with_row_and_turn(demonstrated, found, capsys):
    """Without its calculator the environment answers a call differently."""
    status, report = found(demonstrated, "environment.config.calculator=false")
    before = stored(demonstrated)
    called = {where for where, t in before.items() if any("<calc>" in turn.text for turn in t.turns[:-1])}
    differing = {line["where"]: line for line in report["not_rescored"]}
    assert status == 1 and called and differing.keys() >= called
    assert report["left_out"] == {"differs": len(differing)}
    assert report["all"]["episodes"] == len(before) - len(differing)
    for where in called:
        trajectory = before[where]
        assert re.match(rf"row {trajectory.task_id}, turn \d: another observation: was '", differing[where]["message"])
    status, text = shown(capsys, demonstrated, "environment.config.calculator=false")
    assert status == 1 and f"{len(differing)} not rescored, episodes whose observations differ in the replay" in text


def test_a_replay_with_fewer_turns_is_reported(demonstrated, found):
    status, report = found(demonstrated, "generator.max_turns=1", "environment.config.calculator=false")
    long = {where: t for where, t in stored(demonstrated).items() if len(t.turns) > 1}
    left = {line["where"]: line["message"] for line in report["not_rescored"]}
    assert status == 1 and left.keys() == long.keys() > set()
    for where, message in left.items():
        wanted = "turn 1: the environment ends the episode, and the recording continues"
        assert message == f"row {long[where].task_id}, {wanted}"


def test_an_ambiguous_row_is_not_used():
    prompt = [{"role": "user", "content": "?"}]
    rows = [{"id": "a", "prompt": prompt, "ground_truth": {"n": n}} for n in (1, 2)]
    twice, apart = RowFinder(Splits(rows, [])), RowFinder(Splits(rows[:1], rows[1:]))
    line = StoredLine(Path("x.jsonl"), 1, None)
    with pytest.raises(KeyError, match="2 different rows of train have the id a"):
        twice.find(line, Trajectory("a", "play/train/0", 0))
    with pytest.raises(KeyError, match="no row with the id b"):
        twice.find(line, Trajectory("b", "play/train/0", 0))
    assert apart.find(line, Trajectory("a", "play/train/0", 0)) is rows[0]
    assert apart.find(line, Trajectory("a", "play/test/0", 0)) is rows[1]
    assert apart.find(StoredLine(Path("eval_greedy_step_000001.jsonl"), 1, None), Trajectory("a", "", 0)) is rows[1]


def test_rows_of_other_data_are_not_used(demonstrated, found):
    status, report = found(demonstrated, "data.synthetic_train_rows=10")
    assert status == 1 and report["left_out"] == {"no row": 30}
    status, report = found(demonstrated, "seed=1")
    assert status == 1 and set(report["left_out"]) == {"differs"}
    assert all("turn 1: another prompt" in line["message"] for line in report["not_rescored"])


def pure(messages, row):
    """Component of the reward in the tests below."""
    return float(len(messages)), {"seen": 1.0}


def broken(messages, row):
    if len(messages) > 2:
        raise LookupError("too long")
    return 0.5


def test_a_function_of_the_messages_needs_no_environment(demonstrated, found, capsys, monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    wanted = ("reward.components={environment:0,tests.test_rescore.pure:2}",)
    from mtrl.play.episode import TextEpisode

    monkeypatch.setattr(TextEpisode, "open", lambda self: pytest.fail("the environment was asked"))
    status, report = found(demonstrated, *wanted)
    assert status == 0 and report["environment_replayed"] is False
    for line, trajectory in zip(report["trajectories"], stored(demonstrated).values(), strict=True):
        assert line["reward_after"] == 2.0 * len(trajectory.messages)
    status = rescore([str(demonstrated), *wanted, "environment.config.calculator=false"])
    output = capsys.readouterr()
    assert status == 0 and "the environment was not replayed" in output.out
    assert "environment.config.calculator=false changes no reward" in output.err


def test_a_reward_that_raises_is_reported(demonstrated, found, monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    status, report = found(demonstrated, "reward.components={environment:0,tests.test_rescore.broken:1}")
    long = [where for where, t in stored(demonstrated).items() if len(t.messages) > 2]
    assert status == 1 and [line["where"] for line in report["not_rescored"]] == long
    ((message, count),) = Counter(line["message"] for line in report["not_rescored"]).items()
    assert count == len(long) and "failed: LookupError in test_rescore.py, line" in message and "too long" in message


def test_episodes_without_a_turn_are_not_called_failures_of_the_run(demonstrated, capsys, tmp_path):
    """In self-play a role has no turn if the other one ends the game with its first."""
    trajectory = next(read_trajectories(demonstrated))
    trajectory.turns.clear()
    file = tmp_path / "one.jsonl"
    file.write_text(to_json(trajectory) + "\n")
    status, text = shown(capsys, file)
    assert status == 1 and "1 not rescored, episodes that failed in the run or have no turn" in text


def test_the_table(demonstrated, capsys, tmp_path):
    out = tmp_path / "report.json"
    status, text = shown(capsys, demonstrated, "reward.components.turn_penalty=0.1", f"out={out}")
    first, second, *rest = text.splitlines()
    assert status == 0 and first.split()[:3] == ["trajectories", "episodes", "reward"]
    assert second.split()[:2] == ["demonstrated", "40"]
    report = json.loads(out.read_text())
    assert f"{report['all']['reward_after']:.3f}" in second and f"{report['all']['reward_before']:.3f}" in second
    output = "\n".join(rest)
    assert "highest reward of the episodes that the scorer rejects: demonstrated.jsonl:" in output
    assert "lowest reward of the episodes that the scorer accepts: demonstrated.jsonl:" in output
    assert f"{len(report['accepted_but_unrewarded'])} without full reward, accepted by the scorer" in output
    assert output.endswith(f"written to {out}")


def test_disagreements_are_those_of_reward_and_scorer(demonstrated, found):
    status, report = found(demonstrated, "reward.components={environment:0,turn_penalty:-5}")
    lines = {line["where"]: line for line in report["trajectories"]}
    wanted = {where for where, line in lines.items() if line["reward_after"] >= 1 and not line["score_after"]}
    assert status == 0 and set(report["rewarded_but_rejected"]) == wanted > set()
    rewards = [lines[where]["reward_after"] for where in report["rewarded_but_rejected"]]
    assert rewards == sorted(rewards, reverse=True)


def test_the_claim_threshold_decides_what_the_reward_counts_as_solved(demonstrated, found):
    penalised = "reward.components={environment:0,turn_penalty:-5}"
    assert found(demonstrated, penalised)[1]["rewarded_but_rejected"]
    status, report = found(demonstrated, penalised, "evaluation.claim_threshold=1000")
    assert status == 0 and report["rewarded_but_rejected"] == []
    assert len(report["accepted_but_unrewarded"]) == sum(line["score_after"] >= 1 for line in report["trajectories"])


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["RUN", "trainer.max_steps=3"], "trainer.max_steps=3 changes nothing here: rescoring a run reads reward, env"),
        (["RUN", "experiment=games"], "experiment=games changes nothing here"),
        (["RUN", "reward.scheme=skyrl"], "reward.scheme=skyrl is not known; choose one of default, guide"),
        (["RUN", "reward.shceme=guide"], "did you mean reward.scheme=guide?"),
        (["RUN", "out=nowhere/x.json"], "out=nowhere/x.json cannot be written"),
        (["nowhere"], "nowhere does not exist; give the folder of a run"),
        (["RUN/trajectories"], "trajectories is no run, for it has no config.yaml"),
    ],
)
def test_errors_are_reported_in_one_sentence(run, capsys, words, sentence):
    with pytest.raises(SystemExit) as ended, one_sentence():
        rescore([word.replace("RUN", str(run)) for word in words])
    output = capsys.readouterr()
    assert ended.value.code == 2 and output.out == "" and sentence in output.err and output.err.count("\n") == 1


def test_as_a_program_without_torch(demonstrated, tmp_path):
    code = "import sys; from mtrl.rescore.__main__ import main; status = main(sys.argv[1:]); "
    code += "assert 'torch' not in sys.modules; sys.exit(status)"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
    for start in (["-c", code], ["-m", "mtrl.rescore"]):
        command = [sys.executable, *start, str(demonstrated), "+experiment=gsm8k"]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
        assert (done.returncode, done.stderr) == (0, "")
        assert "\x1b" not in done.stdout and "demonstrated  " in done.stdout


def test_a_file_of_a_run_uses_the_settings_of_the_run(run, found):
    status, report = found(run / "trajectories" / "eval_greedy_step_000002.jsonl")
    assert status == 0 and report["all"]["episodes"] == 4 and report["all"]["changed"] == 0


def test_observations_of_a_server_are_not_replayed(demonstrated, capsys):
    online = ["+experiment=service", "environment.config.customer=endpoint"]
    online += ["environment.config.endpoint={url:'http://127.0.0.1:9/v1',model:m}"]
    with pytest.raises(SystemExit), one_sentence():
        rescore([str(demonstrated), *online])
    assert "lets a server write the observations of service, and a replay gets other ones" in capsys.readouterr().err
