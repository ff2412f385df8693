"""Episodes in the sandbox of this machine, and in containers of Podman and Docker where they run."""

import asyncio
import os
import subprocess

import pytest

from envs.terminal import FAMILY
from envs.terminal.environment import observation
from envs.terminal.task import read_task
from envs.terminal.verdict import run_tests
from mtrl.config.schema import DataConfig
from mtrl.environments.tool_calls import format_call
from mtrl.sandbox.container import CommandResult, ContainerError, ContainerLimits
from mtrl.sandbox.container_supervisor import owner_label
from mtrl.sandbox.engine_container import EngineContainer, engine_path
from tests.container_root import ENGINES, IMAGE, WRITE_ON, need_engine
from tests.envs.episodes import trajectory_of
from tests.sandbox.container_kills import containers
from tests.sandbox.swerex_servers import need_swerex, server


def bash(command):
    return format_call("bash", {"command": command})


def play(row, responses, **settings):
    """Step results of an episode, and its score."""

    async def run():
        environment = FAMILY.environment(**settings)
        try:
            await environment.reset(row)
            return [await environment.step(response, row["ground_truth"]) for response in responses]
        finally:
            environment.close()

    results = asyncio.run(run())
    final = results[-1].observation if results[-1].done else []
    return results, FAMILY.score(trajectory_of(responses, final=final), row)


@pytest.fixture(scope="module")
def shipped():
    splits = FAMILY.load(DataConfig(), 0)
    return [*splits.train, *splits.test]


def test_solutions_of_the_shipped_tasks_earn_the_reward(shipped):
    assert [row["id"] for row in shipped] == ["rename-reports", "count-words"]
    for row in shipped:
        results, score = play(row, FAMILY.gold(row))
        assert (results[-1].reward, results[-1].done, score) == (1.0, True, 1.0)
        assert results[-1].metrics["no_reward_file"] == 0.0


@need_swerex
def test_a_shipped_task_in_a_remote_container(shipped, monkeypatch, tmp_path):
    monkeypatch.setenv("MTRL_CACHE", str(tmp_path))
    with server(monkeypatch) as url:
        for row, reward in ((shipped[1], 1.0), (shipped[0], 0.0)):
            responses = FAMILY.gold(row) if reward else [bash(CHEATS["its own reward"]), "done"]
            results, score = play(row, responses, backend="swerex", servers=[url])
            assert (results[-1].reward, results[-1].done, score) == (reward, True, reward)


CHEATS = {
    "nothing": "true",
    "its own reward": "echo 1 > /logs/verifier/reward.txt; echo '{\"reward\": 1}' > /logs/verifier/reward.json",
    "its own tests": "echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh; mkdir -p /tests/x/y",
    "no place for the reward": "rm -r /logs/verifier; touch /logs/verifier",
    "a reward that rm cannot remove": "echo 1 > /logs/verifier/reward.json; chmod 555 /logs/verifier",
    "a reward below folders": "mkdir -p /logs/verifier/x; echo 1 > /logs/verifier/reward.json; chmod -R 555 /logs",
    "tests that rm cannot remove": "echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh; chmod -R 555 /tests",
    "tests that cannot be copied": "chmod 000 /tests",
    "no room for the tests": "for i in 1 2 3; do cat /dev/zero > /tmp/$i; done",
    "no files left for the tests": "for i in {1..5000}; do : > /tmp/$i; done",
    "no folder to start in": "chmod 000 /workspace /app /tmp",
}


@pytest.mark.parametrize("command", CHEATS.values(), ids=CHEATS.keys())
def test_cheats_earn_nothing(shipped, command):
    results, score = play(shipped[1], [bash(command), "done"])
    assert (results[-1].reward, score) == (0.0, 0.0)


def test_an_episode_out_of_turns_is_judged(shipped):
    row = shipped[1]
    results, score = play(row, [bash("ls /tests; cat poem.txt"), FAMILY.gold(row)[0]], max_turns=2)
    assert results[0].observation[0]["content"].startswith("The tide"), "the folder of the tests is empty"
    assert (results[1].reward, results[1].truncated, score) == (1.0, True, 1.0)


def test_the_time_of_the_task_limits_its_commands(shipped, tmp_path):
    row = shipped[1]
    folder = tmp_path / "hurry"
    subprocess.run(["cp", "-r", row["ground_truth"]["folder"], folder], check=True)
    (folder / "task.toml").write_text("[agent]\ntimeout_sec = 1")
    row = {**row, "ground_truth": {"task": "hurry", "folder": str(folder)}}
    results, _ = play(row, [bash("sleep 30"), bash("echo more")], max_turns=3)
    assert "[the command was stopped: it exceeded its limit of time]" in results[0].observation[0]["content"]
    assert results[1].observation[0]["content"] == "Error: the time of the task is over; answer without a call"


def test_what_the_model_sees_of_a_command():
    assert observation(CommandResult("out\n", 0), 100) == "out\n"
    assert observation(CommandResult("", 2), 100) == "[exit code 2]"
    assert observation(CommandResult("a" * 50 + "b" * 50, 0), 20) == f"{'a' * 10}\n[80 characters left out]\n{'b' * 10}"
    assert observation(CommandResult("a", -1, "it took long"), 9) == "a\n[the command was stopped: it took long]"


TEST = 'if [ "$(cat answer.txt)" = "$WANTED" ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n'


@pytest.fixture(params=ENGINES)
def engine(request, tmp_path):
    """The name of each engine, which leaves no container of this process."""
    need_engine(request.param, tmp_path)
    yield request.param
    assert containers(request.param, owner_label(engine_path(request.param))) == []


def image_row(folder, toml):
    (folder / "tests").mkdir(parents=True)
    (folder / "task.toml").write_text(toml)
    (folder / "instruction.md").write_text("Write 42 into answer.txt.")
    (folder / "tests" / "test.sh").write_text("#!/bin/bash\n" + TEST)
    return {"ground_truth": {"task": folder.name, "folder": str(folder)}}


def test_a_task_with_a_dockerfile_runs(engine, tmp_path):
    row = image_row(tmp_path / "built", "[environment]\nmemory_mb = 64\n[verifier.env]\nWANTED = '42'")
    (tmp_path / "built" / "environment").mkdir()
    (tmp_path / "built" / "environment" / "given.txt").write_text("given")
    (tmp_path / "built" / "environment" / "Dockerfile").write_text(f"FROM {IMAGE}\nWORKDIR /srv\nCOPY given.txt .\n")
    responses = [bash("cat given.txt; echo 42 > answer.txt"), "done"]
    results, score = play(row, responses, backend=engine)
    assert results[0].observation[0]["content"] == "given"
    assert (results[-1].reward, score) == (1.0, 1.0)
    (tmp_path / "built" / "environment" / "Dockerfile").write_text("FROM localhost/mtrl-no-such-image:1\n")
    with pytest.raises(ContainerError, match=f"{engine} cannot build the image of built/environment: .+"):
        play(row, responses, backend=engine)


def test_an_episode_that_fills_its_disk_fails_by_itself(engine, tmp_path):
    row = image_row(tmp_path / "full", f"[environment]\ndocker_image = '{IMAGE}'\nstorage_mb = 16\nmemory_mb = 64")
    results, score = play(row, [bash(WRITE_ON), bash("ls"), "done"], backend=engine)
    for result in results[:2]:
        assert (
            "[the command was stopped: the files of the container exceeded 16 MiB" in result.observation[0]["content"]
        )
    assert (results[-1].reward, results[-1].done, score) == (0.0, True, 0.0)


class FullBeforeTheTests(EngineContainer):
    """A container that is removed for its files just before the tests are copied."""

    def copy_in(self, source, target):
        self._stop_for_disk()
        super().copy_in(source, target)


def test_a_disk_that_is_full_before_the_tests_earns_nothing(engine, tmp_path):
    image_row(tmp_path / "late", "")
    container = FullBeforeTheTests(engine, IMAGE, ContainerLimits(memory="64m", disk_mb=16), "/app")
    try:
        container.start()
        verdict = run_tests(container, read_task(tmp_path / "late"))
    finally:
        container.remove()
    assert (verdict.reward, verdict.is_readable) == (0.0, False) and "exceeded 16 MiB" in verdict.report


def test_a_missing_image_fails_the_episode_and_leaves_no_container(engine, tmp_path):
    row = image_row(tmp_path / "missing", "[environment]\ndocker_image = 'localhost/mtrl-no-such-image:1'")
    with pytest.raises(ContainerError, match=f"{engine} cannot start a container of localhost/mtrl-no-such-image:1"):
        play(row, ["done"], backend=engine)


LOST = """#!/bin/bash
case "$*" in
    exec*begun*) echo begun; exit $CODE ;;
    container*) echo "Cannot connect to the Docker daemon" >&2; exit 1 ;;
esac
"""


@pytest.mark.parametrize("code", [137, 255])
def test_a_daemon_that_is_lost_during_a_command_fails_the_episode(tmp_path, monkeypatch, code):
    """A program in place of docker ends as Docker's client does: 255 after SIGKILL of the daemon, 137 after SIGTERM,
    by which it kills the containers too. The model must not see the loss as the output of its command."""
    engine = tmp_path / "docker"
    engine.write_text(LOST)
    engine.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("CODE", str(code))
    row = image_row(tmp_path / "lost", f"[environment]\ndocker_image = '{IMAGE}'")
    with pytest.raises(ContainerError, match=f"cannot run a command in {IMAGE}: the container has ended"):
        play(row, [bash("echo begun; sleep 5"), "done"], backend="docker")
