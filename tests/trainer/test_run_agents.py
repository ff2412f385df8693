"""Whole runs whose episodes are run by agent programs."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from urllib.request import urlopen

import pytest
from runs import NO_EVALUATION, ROOT, finish, rows_of, start, weights_of

from mtrl.types import read_trajectories
from tests import forked

HERE = Path(__file__).parent / "gsm8k_agents.py"
FUNCTION = ["generator.agent.target=gsm8k_agents.play", "generator.agent.max_concurrent=64"]
SAVED = ["trainer.max_steps=4", "trainer.save_trajectories_every=1", "evaluation.every_steps=4"]
SHORT = [
    "trainer.max_steps=2",
    "trainer.prompts_per_step=2",
    "trainer.save_trajectories_every=1",
    *NO_EVALUATION,
    "evaluation.rows=1",
]

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("agent_runs")]


@pytest.fixture
def run_dir(tmp_path):
    """Folder for a run, beside the module of the agents, which it imports."""
    return beside_agents(tmp_path)


def beside_agents(folder):
    shutil.copy(HERE, folder)
    return folder / "run"


def trajectories_of(run_dir, pattern="train_*.jsonl"):
    files = sorted((run_dir / "trajectories").glob(pattern))
    return [trajectory for file in files for trajectory in read_trajectories(file)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A run with an agent function."""
    run_dir = beside_agents(tmp_path_factory.mktemp("whole"))
    finish(start(run_dir, *FUNCTION, *SAVED))
    return run_dir


def test_a_run_by_an_agent_function_equals_the_run_by_the_environment(undisturbed, tmp_path):
    """Token ids, masks, rewards and weights are equal bit for bit."""
    finish(start(tmp_path / "run", *SAVED))
    pairs = list(zip(trajectories_of(undisturbed), trajectories_of(tmp_path / "run"), strict=True))
    assert len(pairs) == 4 * 4 * 4
    for ours, native in pairs:
        assert ours.task_id == native.task_id and ours.rewards == native.rewards and ours.score == native.score
        for mine, its in zip(ours.turns, native.turns, strict=True):
            assert mine.observation_ids == its.observation_ids and mine.action_ids == its.action_ids
            assert mine.action_logprobs == its.action_logprobs and mine.break_reason == its.break_reason
            assert mine.advantages == its.advantages and mine.versions == its.versions
    assert weights_of(undisturbed) == weights_of(tmp_path / "run")
    rewards = [
        [row.get("rollout/reward/mean") for row in rows_of(folder)] for folder in (undisturbed, tmp_path / "run")
    ]
    assert rewards[0] == rewards[1]


def test_metrics_of_the_agent_and_of_the_gateway_are_logged(undisturbed):
    rows = [row for row in rows_of(undisturbed) if "rollout/reward/mean" in row]
    for row in rows:
        assert row["rollout/episode/moves"] == row["rollout/gateway/overridden"] == row["rollout/turns/mean"] > 1
        assert row["rollout/gateway/unknown_fields"] == 0 and row["rollout/episode/attempts"] == 1


@pytest.mark.parametrize("seconds", [0.5])
def test_a_run_killed_at_any_moment_resumes_exactly(undisturbed, run_dir, seconds):
    words = [*FUNCTION, *SAVED]
    process = start(run_dir, *words)
    while not (run_dir / "metrics.jsonl").exists() and process.poll() is None:
        time.sleep(0.01)
    time.sleep(seconds)
    process.kill()
    process.communicate()
    finish(start(run_dir, *words, "resume=latest"))
    assert rows_of(run_dir) == rows_of(undisturbed)
    assert weights_of(run_dir) == weights_of(undisturbed)


def test_a_run_with_few_concurrent_programs_is_reproducible(run_dir, tmp_path):
    """The set of concurrent episodes does not depend on time."""
    words = [*SHORT, FUNCTION[0], "generator.agent.max_concurrent=3", "trainer.max_steps=1"]
    ends = []
    for name in ("first", "second"):
        finish(start(tmp_path / name, *words))
        check_learnt(tmp_path / name, 8)
        ends.append((weights_of(tmp_path / name), rows_of(tmp_path / name)))
    assert ends[0] == ends[1]


@pytest.mark.ci
def test_a_run_by_a_command(run_dir):
    words = [f"generator.agent.command=[python,{HERE}]", f"generator.agent.env={{PYTHONPATH:'{ROOT}'}}"]
    words += ["generator.local.deterministic=false", "trainer.max_steps=1", "trainer.prompts_per_step=1"]
    words += ["model.warm_start.episodes=1"]  # each episode starts a program
    finish(start(run_dir, *SHORT, *words))
    check_learnt(run_dir, 4)


@pytest.mark.ci
def test_a_run_by_a_server(run_dir):
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    agent = subprocess.Popen([sys.executable, str(HERE), str(port)], env={"PYTHONPATH": str(ROOT)})
    try:
        until_it_listens(port, agent)
        finish(start(run_dir, *SHORT, f"generator.agent.url=http://127.0.0.1:{port}"))
    finally:
        agent.kill()
        agent.wait()
    check_learnt(run_dir, 16)


def until_it_listens(port, agent):
    while agent.poll() is None:
        try:
            return urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
        except OSError:
            time.sleep(0.05)
    raise AssertionError("the agent ended")


def check_learnt(run_dir, episodes):
    """Assert that trajectories are saved and that there were gradients."""
    found = trajectories_of(run_dir)
    assert len(found) == episodes and all(t.error is None and t.turns and t.score is not None for t in found)
    assert any(turn.advantages != [0.0] for t in found for turn in t.turns)
    assert any(row.get("train/grad_norm", 0) > 0 for row in rows_of(run_dir))


def test_a_missing_agent_ends_the_run_at_its_start(run_dir):
    output = finish(start(run_dir, *SHORT, "generator.agent.url=http://127.0.0.1:9"), expected=2)
    last = output.strip().splitlines()[-1]
    assert last.startswith("generator.agent.url=http://127.0.0.1:9: the agent does not answer GET /health")


def test_a_program_that_always_fails_ends_the_run_with_its_error(run_dir):
    broken = "async def play(row, client):\n    await client.achat(row['prompt'])\n    raise LookupError('no tools')\n"
    (run_dir.parent / "broken_agent.py").write_text(broken)
    output = finish(start(run_dir, *SHORT, "generator.agent.target=broken_agent.play"), expected=2)
    assert "LookupError: no tools" in output.strip().splitlines()[-1]


def test_an_evaluation_runs_the_same_agent_as_the_run(undisturbed, tmp_path):
    words = ["-m", "mtrl.evaluate", str(undisturbed), f"evaluation.output={tmp_path}/out", "tracker.plots=false"]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{undisturbed.parent}", "OMP_NUM_THREADS": "1"}
    done = forked.run([sys.executable, *words], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    trained = rows_of(undisturbed)[-1]
    assert row["val/success/mean"] == trained["val/success/mean"]
    assert row["val/reward/mean"] == trained["val/reward/mean"]
