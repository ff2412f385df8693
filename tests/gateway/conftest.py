import pytest


@pytest.fixture
def session(live, request):
    """A trajectory at the module's own gateway, `live`."""
    session = live.open(request.node.name)
    yield session
    live.close(session)
