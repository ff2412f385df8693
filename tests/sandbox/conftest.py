"""Process sandboxes with low limits, for attacks."""

import pytest

from mtrl.sandbox.process import ProcessLimits, ProcessSandbox

LIMITS = ProcessLimits(
    seconds=20.0,
    memory_bytes=256 * 2**20,
    processes=32,
    file_bytes=4 * 2**20,
    workspace_bytes=8 * 2**20,
    workspace_files=500,
    printed_bytes=4 * 2**20,
)


@pytest.fixture(scope="module")
def bystander():
    """A second sandbox that exists at the same time."""
    with ProcessSandbox(LIMITS) as sandbox:
        yield sandbox


@pytest.fixture
def sandbox(bystander):
    """A sandbox; after each test, commands in it and in the bystander must still work."""
    with ProcessSandbox(LIMITS) as sandbox:
        yield sandbox
        sandbox.run("rm -rf /workspace/* /tmp/* /dev/shm/*")
        for one in (sandbox, bystander):
            assert one.run("echo ok > ok; cat ok").stdout == "ok\n"
