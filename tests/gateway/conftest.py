import pytest


@pytest.fixture
def session(live, request):
    """A trajectory at the gateway `live` of the module."""
    session = live.open(request.node.name)
    yield session
    live.close(session)
