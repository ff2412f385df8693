"""Fixture with the family of `tests/echo.py`, whose counter of closed environments starts at 0."""

import pytest

from tests.echo import Echo, echo_family


@pytest.fixture
def echo():
    """The family of `tests/echo.py`."""
    Echo.closed = 0
    return echo_family()
