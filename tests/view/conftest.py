"""Fixtures with viewers that several tests share."""

import pytest

from mtrl.record.library import Library
from mtrl.view.http_api import Api
from tests.view.made_runs import make_run


@pytest.fixture
def api_of():
    """Return an `Api` of these folders, with all trajectories indexed."""

    def make(*paths):
        from mtrl.view.export import wait_for_indexes

        api = Api(Library(paths))
        for run in api.library.runs:
            wait_for_indexes(run)
        return api

    return make


@pytest.fixture(scope="module")
def browser():
    """One browser per test module. Modules do not share it, because it runs an event loop in the main thread."""
    from tests.view.page_browser import chromium

    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def made_run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs") / "one")
