"""The helpers that these tests share with those of the rollouts."""

from tests.rollout.conftest import contexts, counting, generation, make_loop, play, play_episode, row, sampling

__all__ = ["contexts", "counting", "generation", "make_loop", "play", "play_episode", "row", "sampling"]
