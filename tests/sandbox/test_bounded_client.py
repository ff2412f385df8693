"""A client is limited in time and output, and no shell reads its arguments."""

import signal
import subprocess
import threading

import pytest

from mtrl.sandbox import bounded_client
from mtrl.sandbox.bounded_client import OUTPUT_BYTES, run_bounded


def test_a_client_that_hangs_is_killed(monkeypatch):
    monkeypatch.setattr(bounded_client, "SLACK_SECONDS", 0.5)
    result = run_bounded(["bash", "-c", "echo begun; sleep 100 & sleep 100"], 0.5)
    assert result.output == "begun\n" and result.exit_code == -1 and "more than 0.5 s" in result.stopped
    result = run_bounded(["bash", "-c", "head -c 3000000 /dev/zero; sleep 100"], 60)
    assert len(result.output) == OUTPUT_BYTES and "printed more than" in result.stopped


def test_arguments_and_input_arrive_unchanged():
    result = run_bounded(["bash", "-c", 'printf "%s|" "$1"; cat', "name", "$(id) 'x'"], 20, stdin=b"in\xff")
    assert (result.output, result.exit_code, result.stopped) == ("$(id) 'x'|in�", 0, "")


def test_a_client_without_a_thread_for_its_time_limit_is_killed(monkeypatch):
    def fail(_):
        raise RuntimeError("can't start new thread")

    started, popen = [], subprocess.Popen
    monkeypatch.setattr(threading.Timer, "start", fail)
    monkeypatch.setattr(
        subprocess, "Popen", lambda *call, **options: started.append(popen(*call, **options)) or started[0]
    )
    with pytest.raises(RuntimeError, match="new thread"):
        run_bounded(["sleep", "100"], 60)
    assert started[0].returncode == -signal.SIGKILL and started[0].stdout.closed
