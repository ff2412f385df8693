"""Whole runs whose turns the real engines sample: they train, overlap, and survive the loss of a server."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from mtrl.command.compose import compose
from mtrl.environments.factory import load_task
from mtrl.trainer.setup import parts as setup
from mtrl.types import read_trajectories
from tests.engines.real.installed import engine_python
from tests.trainer.runs import SMALL, finish, rows_of, start

pytestmark = [pytest.mark.slow, pytest.mark.rare]

KEY = "MTRL_TEST_RUNS_KEY"
QUICK = [
    "evaluation.before_train=false", "evaluation.every_steps=0", "evaluation.rows=4", "evaluation.sampled_rows=0",
    "algorithm.group_size=4",
]  # fmt: skip
STEPS = 6


@pytest.fixture(scope="module", params=["vllm", "sglang"])
def engine(request):
    engine_python(request.param)
    return request.param


def tree_of(pid):
    """Return the ids of all descendants of this process."""
    found = [int(child) for task in Path(f"/proc/{pid}/task").glob("*/children") for child in task.read_text().split()]
    return [*found, *(pid for child in found for pid in tree_of(child))]


def servers_of(pid, engine):
    """Return the process ids of the servers of a run."""
    entry = f"mtrl.engines.{engine}.serve"
    commands = {child: Path(f"/proc/{child}/cmdline").read_bytes().decode().split("\0") for child in tree_of(pid)}
    return [child for child, words in commands.items() if entry in words and "supervisor" not in " ".join(words)]


def wait_for_step(run_dir, process, step):
    end = time.monotonic() + 280
    while time.monotonic() < end and process.poll() is None:
        metrics = run_dir / "metrics.jsonl"
        if metrics.exists() and any(json.loads(line)["step"] >= step for line in metrics.read_text().splitlines()):
            return
        time.sleep(0.05)
    raise AssertionError(f"step {step} did not come: {process.poll()}")


@pytest.mark.parametrize("workers", [0, 2])
def test_an_overlapping_run_survives_the_loss_of_a_server(engine, workers, tmp_path, monkeypatch):
    """Two servers and one step off policy; one server is killed while both sample, for rank 0, or for rollout workers
    by adapters."""
    monkeypatch.setenv("RAY_ADDRESS", "local")
    run_dir = tmp_path / "run"
    words = [f"generator={engine}", f"generator.{engine}.replicas=2", "async_config.max_steps_off_policy=1"]
    if workers:
        words += [f"rollouts.workers={workers}", "model.lora_rank=8", f"generator.{engine}.lora=adapter"]
    process = start(run_dir, *words, *QUICK, f"trainer.max_steps={STEPS}", "trainer.save_trajectories_every=1")
    try:
        wait_for_step(run_dir, process, 1)
        servers = servers_of(process.pid, engine)
        assert len(servers) == 2
        os.kill(servers[0], signal.SIGKILL)
        output = finish(process)
    finally:
        process.kill()
    rows = rows_of(run_dir)
    assert [row["step"] for row in rows if "train/loss" in row] == list(range(1, STEPS + 1)), output
    assert max(row["analysis/staleness/max"] for row in rows if "analysis/staleness/max" in row) <= 1
    checked = [row["engine/canary/max"] for row in rows if "engine/canary/max" in row]
    assert len(checked) == STEPS and max(checked) < 1e-4
    assert rows[-1]["engine/restarts"] >= 1
    assert "it is restarted" in output
    stored = [json.loads(line) for path in (run_dir / "trajectories").glob("train_*.jsonl") for line in path.open()]
    names = [(t["group_id"], t["index"]) for t in stored]
    assert len(names) == len(set(names)) == STEPS * 4 * 4


@pytest.fixture(scope="module")
def adapted(engine, serving, tmp_path_factory):
    """A run of adapters on running servers that was resumed from its checkpoint, and the output after that."""
    run_dir = tmp_path_factory.mktemp("adapted") / "run"
    config = OmegaConf.to_object(compose([*SMALL, f"run_dir={run_dir}"]))
    policy = setup.start_of(config, load_task(config), lambda step, loss: None)
    server = serving(engine, Path(policy), context=512)
    # With vLLM all turns are in one message.
    words = [f"generator={engine}", f"generator.{engine}.urls=[{server.url}]", f"generator.{engine}.api_key_env={KEY}"]
    words += ["model.lora_rank=8", "model.lora_alpha=16", *QUICK]
    words += ["generator.use_conversation_multi_turn=false"] if engine == "vllm" else []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(KEY, server.place.token)
        patch.setenv("NO_PROXY", "127.0.0.1")
        finish(start(run_dir, *words, "trainer.max_steps=2"))
        output = finish(start(run_dir, *words, "trainer.max_steps=3", "resume=latest"))
    server.process.end(1.0)
    assert server.place.token not in output
    return run_dir, output


def test_external_servers_train_adapters_with_resume(adapted):
    run_dir, output = adapted
    assert "resumed from" in output
    rows = [row for row in rows_of(run_dir) if "train/loss" in row]
    assert [row["policy/version"] for row in rows] == [1, 2, 3]
    assert all(row["engine/canary/max"] < 1e-4 and row["analysis/logprob_drift/max"] < 1e-3 for row in rows)


def test_servers_evaluate_a_checkpoint(engine, adapted, tmp_path, capsys):
    """The adapters are merged for the servers, whose greedy turns equal those of the embedded engine."""
    from mtrl.evaluation.command import main

    (run_dir, _), message = adapted, {}
    for backend in (engine, "local"):
        out = tmp_path / backend
        words = [f"generator.backend={backend}", f"generator.{engine}.urls=[]", f"evaluation.output={out}"]
        assert main([f"{run_dir}/checkpoints/latest", *words]) == 0, capsys.readouterr()
        (file,) = (out / "trajectories").glob("*_greedy.jsonl")
        message[backend] = [[turn.text for turn in trajectory.turns] for trajectory in read_trajectories(file)]
    assert len(message[engine]) == 4 and message[engine] == message["local"]
