"""Whole runs of self-play: they resume exactly, and report each role by itself."""

import pytest
from runs import NO_EVALUATION, finish, rows_of, start, weights_of

pytestmark = pytest.mark.slow

GAME = [
    "experiment=tic_tac_toe",
    *NO_EVALUATION,
    "reward=default",
    "reward.scheme=default",
    "generator.max_turns=5",
    "trainer.prompts_per_step=2",
    "trainer.max_steps=2",
    "trainer.checkpoint.every_steps=1",
]


def test_a_resumed_run_against_frozen_weights_is_exact(tmp_path):
    """The resumed run takes the opponent's weights from the start of the run, not from its checkpoint."""
    whole, half = tmp_path / "whole", tmp_path / "half"
    words = [*GAME, "environment.opponent=frozen"]
    finish(start(whole, *words))
    finish(start(half, *words, f"resume={whole}/checkpoints/step_000001"))
    last = rows_of(whole)[-1]
    assert last["train/grad_norm"] > 0 and {"rollout/x/reward/mean", "rollout/o/reward/mean"} & last.keys()
    assert rows_of(half) == rows_of(whole)[-1:] and weights_of(half) == weights_of(whole)
