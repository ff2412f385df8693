"""A fixture of tests of whole runs."""

import pytest


@pytest.fixture(scope="session")
def whole_run(tmp_path_factory):
    """The folder of an undisturbed run, with the checks at its start and its diagnosis. Tests do not change it."""
    from runs import finish, start

    run_dir = tmp_path_factory.mktemp("whole") / "run"
    finish(start(run_dir, "preflight.at_start=warn", "diagnosis.live=warn"))
    return run_dir
