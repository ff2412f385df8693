"""Whole runs with overlapping rollouts and updates, or with adapters: results and staleness."""

import json
import signal

import pytest
from runs import NO_EVALUATION, finish, rows_of, start, weights_of

from mtrl.types import read_trajectories

pytestmark = pytest.mark.slow

IN_PROCESS = "generator.local.process=false"
AS_A_STREAM = "import mtrl.trainer.loop as loop; loop.Collector = loop.Stream"


def trained(run_dir):
    """Return the trajectories by step."""
    files = sorted((run_dir / "trajectories").glob("train_step_*.jsonl"))
    return {int(file.stem.rpartition("_")[2]): list(read_trajectories(file)) for file in files}


def test_the_stream_at_staleness_0_is_the_synchronous_run_bit_for_bit(tmp_path):
    words = ["trainer.max_steps=4", "evaluation.every_steps=0"]  # a stream continues during evaluations
    finish(start(tmp_path / "plain", *words))
    finish(start(tmp_path / "stream", *words, code=AS_A_STREAM))
    plain, stream = rows_of(tmp_path / "plain"), rows_of(tmp_path / "stream")
    flow = [{key for key in row if key.startswith("async/")} for row in stream]
    assert not flow[0] and all(flow[1:])  # the run used the stream
    assert [{k: v for k, v in row.items() if not k.startswith("async/")} for row in stream] == plain
    assert weights_of(tmp_path / "stream") == weights_of(tmp_path / "plain")


@pytest.mark.parametrize(
    ("lag", "words"),
    [
        (1, []),
        pytest.param(
            2,
            ["async_config.in_flight=drain", "generator.local.process=true", "generator.local.replicas=2"],
            marks=pytest.mark.ci,
        ),
        (1, ["async_config.on_stale=requeue", "algorithm.dynamic_sampling_rounds=4", "model.lora_rank=8"]),
    ],
)
def test_no_token_is_older_than_allowed_and_no_group_is_trained_twice(tmp_path, lag, words):
    """The engine is in the process of the trainer, or in two others; that of `test_run_kills.py` is in one other."""
    run_dir = tmp_path / "run"
    words = [f"async_config.max_steps_off_policy={lag}", "trainer.save_trajectories_every=1", IN_PROCESS, *words]
    finish(start(run_dir, *words, *NO_EVALUATION, "trainer.max_steps=6"))
    rows = {row["step"]: row for row in rows_of(run_dir)}
    assert rows.keys() == set(range(1, 7))
    ages = [row["analysis/staleness/max"] for row in rows.values()]
    assert max(ages) <= lag and any(ages)
    seen = set()
    for step, trajectories in trained(run_dir).items():
        for trajectory in trajectories:
            assert step - 1 - (trajectory.oldest_version or 0) <= lag
        groups = {t.group_id for t in trajectories}
        assert not groups & seen
        seen |= groups
    assert "val/success/mean" in rows[6]
    spans = [json.loads(line) for line in (run_dir / "timeline.jsonl").read_text().splitlines()]
    updated = {span["step"]: span["end"] for span in spans if span["name"] == "update"}
    rollouts = [span for span in spans if span["name"] == "rollout"]
    # Episodes count for the step during which they ran, not for the step that trains on them.
    assert rollouts and all(span["start"] >= updated.get(span["step"] - 1, 0.0) for span in rollouts)


def test_a_signal_does_not_wait_for_slow_episodes(tmp_path):
    code = """
    import asyncio
    from mtrl.rollout.rollouts import Rollouts
    play = Rollouts.group
    async def slow(self, group_id, *rest):
        if group_id.startswith("step3"):
            print("it hangs", flush=True)
            await asyncio.sleep(3600)
        return await play(self, group_id, *rest)
    Rollouts.group = slow
    """
    words = ["async_config.max_steps_off_policy=1", "trainer.checkpoint.every_steps=0", IN_PROCESS]
    process = start(tmp_path / "run", *words, code=code)
    for line in process.stdout:
        if line.split()[:1] == ["3"]:  # the line of step 3: the fourth has no groups
            break
    process.send_signal(signal.SIGTERM)
    assert "SIGTERM: saved at step 3" in finish(process, expected=75)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_000003"]
    groups = [json.loads(line) for line in (tmp_path / "run/checkpoints/step_000003/groups.jsonl").open()]
    waiting = {entry["group"]["group_id"] for entry in groups if "group" in entry}
    assert {f"step3/{n}" for n in range(4)} <= waiting


def test_adapters_are_trained_saved_and_resumed(tmp_path):
    """The engine's log-probs equal the trainer's with adapters, from the first step and after a resumption."""
    words = ["model.lora_rank=8", "trainer.optimizer.lr=1e-2", "trainer.max_steps=4", *NO_EVALUATION]
    finish(start(tmp_path / "whole", *words))
    rows = rows_of(tmp_path / "whole")
    assert max(row["analysis/logprob_drift/max"] for row in rows) < 1e-4
    assert rows[0]["train/grad_norm"] > 0
    finish(start(tmp_path / "half", *words, f"resume={tmp_path}/whole/checkpoints/step_000002"))
    assert rows_of(tmp_path / "half") == rows[-2:]
    assert weights_of(tmp_path / "half") == weights_of(tmp_path / "whole")
