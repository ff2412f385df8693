"""The sandbox of this machine as a container."""

import pytest

from mtrl.sandbox.bubblewrap_container import BubblewrapContainer, may_be_cwd
from mtrl.sandbox.container import ContainerError, copy_out
from mtrl.sandbox.process import ProcessLimits


def test_a_sandbox_behaves_like_a_container(tmp_path):
    (tmp_path / "run.sh").write_text("#!/bin/bash\necho run in $PWD with $A\n")
    (tmp_path / "run.sh").chmod(0o755)
    container = BubblewrapContainer(ProcessLimits(), "/app", ("logs",))
    with pytest.raises(ContainerError, match="has not been started"):
        container.run("true", 5)
    container.start()
    try:
        container.copy_in(tmp_path, "/logs")
        assert container.run("/logs/run.sh | tee a.txt; exit 3", 20, {"A": "it's"}).exit_code == 3
        assert copy_out(container, "/app/a.txt") == "run in /app with it's\n"
        assert copy_out(container, "/app") is None
        assert container.run("touch /x || touch /etc/x || touch /var/x", 20).exit_code != 0
        late = container.run("sleep 100", 1)
        assert (late.exit_code, late.stopped) == (-1, "it exceeded its limit of time")
        with pytest.raises(ContainerError, match="cannot copy .* to /nothing"):
            container.copy_in(tmp_path, "/nothing")
    finally:
        container.remove()
        container.remove()
    with pytest.raises(ContainerError, match="closed"):
        container.run("true", 5)


@pytest.mark.parametrize("cwd", ["/workspace", "/tmp"])
def test_a_folder_that_each_sandbox_has_can_be_the_working_directory(cwd):
    container = BubblewrapContainer(ProcessLimits(), cwd)
    container.start()
    try:
        assert may_be_cwd(cwd) and container.run("pwd > a; cat a", 20).output == f"{cwd}\n"
    finally:
        container.remove()


@pytest.mark.parametrize("path", ["/", "", "/etc", "/usr/", "/home/user", "/tmp/x", "/.", "/app/.."])
def test_other_paths_cannot_be_the_working_directory(path):
    assert not may_be_cwd(path)
