"""No process of a server survives the server or the trainer, however either ends."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from process_tree import DEAF, SPREAD, STAY, TRAINER, alive, kill, parent_of, pids, tree, wait_for

from mtrl.engines.server import supervised_process as process_module
from mtrl.engines.server import supervisor
from mtrl.engines.server.backend import ServerCommand
from mtrl.engines.server.process import ServerProcess


@pytest.fixture
def start(tmp_path):
    """Function `start(then)` that returns a `ServerProcess` with a tree of processes, which end with the test."""
    started = []

    def make(then=STAY):
        started.append(ServerProcess(tree(tmp_path, then), tmp_path / "log", "toy"))
        return started[-1]

    yield make
    for server in started:
        server.end(0)
    if (tmp_path / "pids").exists():
        assert not alive([int(line) for line in (tmp_path / "pids").read_text().split()])


@pytest.mark.parametrize(("then", "signal_name"), [(STAY, "SIGTERM"), (DEAF, "SIGKILL")])
def test_end_kills_the_whole_process_tree(start, tmp_path, then, signal_name):
    server = start(then)
    found = pids(tmp_path)
    assert server.running and server.returncode is None and server.pid == found[0]
    assert server.end(0.5) == f"was killed by {signal_name}"
    assert not alive(found)
    assert not server.running and server.returncode == -signal.Signals[signal_name]
    assert server.end() == f"was killed by {signal_name}"


def test_a_server_may_exit_during_the_grace_period(start, tmp_path):
    server = start("signal.signal(signal.SIGTERM, lambda *_: sys.exit(7)); " + STAY)
    found = pids(tmp_path)
    assert server.end(30) == "ended with status 7"
    assert not alive(found)


def test_a_stopped_server_is_ended(start, tmp_path):
    server = start(DEAF)
    found = pids(tmp_path)
    for pid in found:
        os.kill(pid, signal.SIGSTOP)
    assert server.end(0.2) == "was killed by SIGKILL"
    assert not alive(found)


@pytest.mark.parametrize(
    ("then", "code", "how"),
    [
        ("be_ready(); sys.exit(3)", 3, "ended with status 3"),
        ("be_ready(); os.kill(os.getpid(), signal.SIGSEGV)", -signal.SIGSEGV, "was killed by SIGSEGV"),
    ],
)
def test_the_process_tree_ends_when_the_server_dies(start, tmp_path, then, code, how):
    server = start(then)
    assert asyncio.run(asyncio.wait_for(server.wait(), 30)) == code
    assert not alive(pids(tmp_path))
    assert not server.running and server.returncode == code and server.end() == how


def test_the_process_tree_ends_when_the_server_is_killed(start, tmp_path):
    server = start()
    found = pids(tmp_path)
    kill(server.pid)
    wait_for(lambda: not server.running)
    assert not alive(found) and server.returncode == -signal.SIGKILL


GUARDIANS = ["supervisor", "the one above"]


def guardian(server, which):
    inner = parent_of(server.pid)
    return inner if which == "supervisor" else parent_of(inner)


@pytest.mark.parametrize("which", GUARDIANS)
def test_the_process_tree_ends_when_a_supervisor_is_killed(start, tmp_path, which):
    server = start()
    found = pids(tmp_path)
    kill(guardian(server, which))
    wait_for(lambda: not server.running)
    assert server.returncode == (-signal.SIGKILL if which == "supervisor" else -signal.SIGTERM)
    wait_for(lambda: not alive(found))


@pytest.mark.parametrize("which", GUARDIANS)
def test_the_process_tree_ends_when_supervisor_and_trainer_are_killed(tmp_path, which):
    program = [sys.executable, "-c", TRAINER.format(end=""), str(tmp_path), SPREAD + STAY]
    with subprocess.Popen(program, start_new_session=True) as trainer:
        found = pids(tmp_path)
        inner = parent_of(found[0])
        kill(trainer.pid, inner if which == "supervisor" else parent_of(inner))
    wait_for(lambda: not alive(found))


def test_supervisors_that_are_stopped_continue_to_end_the_process_tree(start, tmp_path):
    server = start()
    found = pids(tmp_path)
    for which in reversed(GUARDIANS):
        os.kill(guardian(server, which), signal.SIGSTOP)
    assert server.end(0.1) == "was killed by SIGTERM"
    assert not alive(found)


@pytest.mark.parametrize("which", GUARDIANS)
def test_a_supervisor_that_stays_stopped_does_not_block_the_end(start, tmp_path, monkeypatch, which):
    monkeypatch.setattr(process_module, "KILL_TIMEOUT", 0.5)
    send = supervisor.send
    monkeypatch.setattr(supervisor, "send", lambda pid, number: number == signal.SIGCONT or send(pid, number))
    server = start()
    found = pids(tmp_path)
    os.kill(guardian(server, which), signal.SIGSTOP)
    assert server.end(0.1) == ("was killed by SIGKILL" if which == "supervisor" else "was killed by SIGTERM")
    assert not alive(found)


@pytest.mark.parametrize(
    ("which", "number"),
    zip([*GUARDIANS, *GUARDIANS], [signal.SIGTERM] * 2 + [signal.SIGINT, signal.SIGHUP], strict=True),
)
def test_a_signal_to_a_supervisor_ends_the_process_tree(start, tmp_path, which, number):
    server = start()
    found = pids(tmp_path)
    os.kill(guardian(server, which), number)
    wait_for(lambda: not server.running)
    assert not alive(found) and server.returncode == -signal.SIGTERM


@pytest.mark.parametrize(
    "end",
    [
        "os.kill(os.getpid(), 9)",
        "os.fork() and os.kill(os.getpid(), 9)",  # a copy of the process runs on, and keeps its end of the channel open
        "sys.exit()",
        "raise RuntimeError('a bug')",
    ],
)
def test_the_server_ends_when_the_trainer_ends(tmp_path, end):
    program = [sys.executable, "-c", TRAINER.format(end=end), str(tmp_path), SPREAD + (DEAF if "exit" in end else STAY)]
    with subprocess.Popen(program, stderr=subprocess.DEVNULL, start_new_session=True) as trainer:
        try:
            found = pids(tmp_path)
            trainer.wait(30)
            wait_for(lambda: not alive(found))
        finally:
            with suppress(ProcessLookupError):
                os.killpg(trainer.pid, signal.SIGKILL)


def test_an_idle_supervisor_does_not_wake_up(start, tmp_path):
    server = start()
    pids(tmp_path)
    guardians = [guardian(server, which) for which in GUARDIANS]

    def wakings():
        status = "".join(Path(f"/proc/{pid}/status").read_text() for pid in guardians)
        return sum(int(line.split()[1]) for line in status.splitlines() if line.startswith("voluntary_ctxt"))

    before = wakings()
    time.sleep(1)
    assert server.running and wakings() - before <= 2


def test_the_supervisor_reaps_orphans(tmp_path):
    """Otherwise ended grandchildren would be zombies while the server runs."""
    orphans = "import os, time\nfor _ in range(5):\n    if os.fork() == 0:\n        os.fork(); os._exit(0)\n"
    code = orphans + f"    os.wait()\nopen({str(tmp_path / 'done')!r}, 'w').close(); time.sleep(600)"
    server = ServerProcess(ServerCommand([sys.executable, "-S", "-c", code]), tmp_path / "log", "toy")
    try:
        wait_for((tmp_path / "done").exists)
        inner = parent_of(server.pid)
        wait_for(lambda: [one.pid for one in supervisor.processes() if one.parent == inner] == [server.pid])
    finally:
        server.end(0)


def test_descendants_of_processes():
    line = [supervisor.Process(pid, pid // 2, 1, False) for pid in range(1, 16)]
    assert supervisor.below([3], line) == {6, 7, 12, 13, 14, 15}
    assert supervisor.below([9], line) == set()
    circle = [supervisor.Process(1, 2, 1, False), supervisor.Process(2, 1, 1, False)]
    assert supervisor.below([1], circle) == {1, 2}
