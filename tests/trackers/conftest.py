"""Fixtures with generated rows and trajectories, shared with the tests of a run's folder."""

from tests.record.conftest import episode, plain_environment, printed, rows, turn

__all__ = ["episode", "plain_environment", "printed", "rows", "turn"]
