"""Fixtures with virtual time."""

import asyncio

import pytest
from toy_servers import Cluster, VirtualPolicy, make_engine


@pytest.fixture
def virtual_time():
    """Make every event loop of the test a `VirtualLoop`."""
    asyncio.set_event_loop_policy(VirtualPolicy())
    yield
    asyncio.set_event_loop_policy(None)


@pytest.fixture
def cluster(virtual_time):
    return Cluster()


@pytest.fixture
def make(monkeypatch, cluster):
    """Function `make(**settings)` that returns an engine whose servers are in memory."""

    def make(**settings):
        return make_engine(monkeypatch, cluster, **settings)

    return make
