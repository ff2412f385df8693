"""Fixtures that the engine tests share with those of the rollouts."""

import pytest

from tests.rollout.conftest import contexts, counting, generation, make_loop, row, run_episode, sample_turns, sampling

__all__ = ["contexts", "counting", "generation", "make_loop", "row", "run_episode", "sample_turns", "sampling"]


@pytest.fixture
def forked_children(monkeypatch):
    """Fork the processes of engines, so that their imports take no time."""
    from engine_processes import ForkedChild

    from mtrl.engines.local import process

    monkeypatch.setattr(process, "Child", ForkedChild)
