"""Fixtures that the engine tests share with those of the rollouts."""

from tests.rollout.conftest import contexts, counting, generation, make_loop, row, run_episode, sample_turns, sampling

__all__ = ["contexts", "counting", "generation", "make_loop", "row", "run_episode", "sample_turns", "sampling"]
