"""Real servers of SWE-ReX on loopback, each in a sandbox with fresh folders that is started again when it ends."""

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager

import pytest

PYTHON = os.environ.get("MTRL_SWEREX_PYTHON") or (sys.executable if importlib.util.find_spec("swerex") else None)
TOKEN = "sesame-of-the-tests"
READ_ONLY = ("bin", "etc", "lib", "lib32", "lib64", "opt", "usr")
"""Folders of this machine that a server sees; all others are its own."""
LOOP = 'while :; do "$@" || sleep 0.1; done'

need_swerex = pytest.mark.skipif(PYTHON is None, reason="needs MTRL_SWEREX_PYTHON=$(scripts/install_swerex.sh)")


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def server(monkeypatch):
    """The address of a server in a loop, whose token is in the environment."""
    monkeypatch.setenv("MTRL_SWEREX_TOKEN", TOKEN)
    port = free_port()
    seen = [f"/{name}" for name in READ_ONLY] + [prefix(PYTHON), prefix(os.path.realpath(PYTHON))]
    inside = ["bwrap", "--tmpfs", "/tmp", *[word for folder in seen for word in ("--ro-bind-try", folder, folder)]]
    inside += ["--dev", "/dev", "--proc", "/proc", "--unshare-pid"]
    program = [PYTHON, "-m", "swerex", "--host", "127.0.0.1", "--port", str(port), "--auth-token", TOKEN]
    command = ["bash", "-c", LOOP, "loop", *inside, "--die-with-parent", *program]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def prefix(python):
    """The folder of an environment or an installation of Python."""
    return os.path.dirname(os.path.dirname(python))


def answers(url):
    """Whether a server answers requests; a slow one does."""
    try:
        urllib.request.urlopen(f"{url}/is_alive", timeout=5)
    except urllib.error.HTTPError:
        return True  # without a token
    except OSError as error:
        return isinstance(getattr(error, "reason", error), TimeoutError)
    return True


def until(condition, seconds=60):
    """Wait until a condition holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)
