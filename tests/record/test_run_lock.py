"""Two runs cannot write into one folder, and a killed run leaves no lock."""

import fcntl
import os
import signal
import subprocess
import sys

import pytest

from mtrl.command.compose import compose
from mtrl.errors import UserError
from mtrl.record.run_dir import RunDir
from mtrl.record.run_lock import RunLock, is_held
from mtrl.trainer import run as running

HOLD = """
import sys
from mtrl.record.run_dir import RunDir
from mtrl.record.run_lock import RunLock
with RunLock(RunDir(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def run(tmp_path):
    return RunDir(tmp_path / "run").create()


@pytest.fixture
def holder(run):
    """Another process that writes into the folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(run)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_the_lock_is_free_after_its_block(run):
    for _ in range(2):
        with RunLock(run), pytest.raises(UserError), RunLock(run):
            pytest.fail("held twice")


def test_a_killed_process_frees_the_lock(run, holder):
    assert is_held(run)
    with pytest.raises(UserError, match=f"run_dir={run} is being written by a process that has not ended"):
        RunLock(run).__enter__()
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert not is_held(run)
    with RunLock(run):
        pass


def test_a_reader_of_the_lock_does_not_stop_a_run(run, monkeypatch):
    """The reader's own lock ends while the run waits for its second attempt."""
    run.log.touch()
    reader = os.open(run.log, os.O_RDONLY)
    fcntl.flock(reader, fcntl.LOCK_SH)
    monkeypatch.setattr("time.sleep", lambda seconds: os.close(reader))
    with RunLock(run):
        assert is_held(run)


@pytest.mark.parametrize("kind", ["missing", "pipe", "link"])
def test_nothing_but_a_file_is_held(run, holder, tmp_path, kind):
    other = RunDir(tmp_path)
    if kind == "pipe":
        os.mkfifo(other.log)
    elif kind == "link":
        other.log.symlink_to(run.log)
    assert is_held(run) and not is_held(other)


def test_a_run_that_another_process_leads_is_not_changed(run, holder):
    with pytest.raises(UserError, match="end it first, or name another folder"):
        running.train(compose(["experiment=gsm8k", f"run_dir={run}"]))
    assert not run.config.exists() and not run.log.read_text()


def test_a_run_starts_on_a_file_system_without_locks(run, monkeypatch):
    def no_locks(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", no_locks)
    with RunLock(run):
        pass
