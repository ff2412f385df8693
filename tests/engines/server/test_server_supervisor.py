"""Nothing of a server outlives it or the trainer, however either goes."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from process_tree import DEAF, SPREAD, STAY, TRAINER, alive, kill, parent_of, pids, tree, wait_for

from mtrl.engines.server import supervised_process as process_module
from mtrl.engines.server import supervisor
from mtrl.engines.server.backend import Command
from mtrl.engines.server.process import ServerProcess


@pytest.fixture
def start(tmp_path):
    """`start(then)`: a `ServerProcess` with a tree of processes below it; ended after the test, whatever it did."""
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
def test_an_order_ends_the_whole_tree(start, tmp_path, then, signal_name):
    server = start(then)
    found = pids(tmp_path)
    assert server.running and server.returncode is None and server.pid == found[0]
    assert server.end(0.5) == f"was killed by {signal_name}"
    assert not alive(found)
    assert not server.running and server.returncode == -signal.Signals[signal_name]
    assert server.end() == f"was killed by {signal_name}"


def test_a_server_may_end_by_itself_when_it_is_asked(start, tmp_path):
    server = start("signal.signal(signal.SIGTERM, lambda *_: sys.exit(7)); " + STAY)
    found = pids(tmp_path)
    assert server.end(30) == "ended with status 7"
    assert not alive(found)


def test_a_server_that_is_stopped_is_ended(start, tmp_path):
    server = start(DEAF)
    found = pids(tmp_path)
    for pid in found:
        os.kill(pid, signal.SIGSTOP)
    assert server.end(0.2) == "was killed by SIGKILL"
    assert not alive(found)


@pytest.mark.parametrize(
    ("then", "code", "how"),
    [
        ("sys.exit(3)", 3, "ended with status 3"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", -signal.SIGSEGV, "was killed by SIGSEGV"),
    ],
)
def test_a_server_that_dies_takes_its_tree_along(start, tmp_path, then, code, how):
    server = start(then)
    assert server._ended.result(30) == code
    assert not alive(pids(tmp_path))
    assert not server.running and server.returncode == code and server.end() == how


def test_a_server_that_is_killed_takes_its_tree_along(start, tmp_path):
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
def test_a_supervisor_that_is_killed_takes_the_tree_along(start, tmp_path, which):
    server = start()
    found = pids(tmp_path)
    kill(guardian(server, which))
    wait_for(lambda: not server.running)
    assert server.returncode == (-signal.SIGKILL if which == "supervisor" else -signal.SIGTERM)
    wait_for(lambda: not alive(found))


@pytest.mark.parametrize("which", GUARDIANS)
def test_a_supervisor_that_is_killed_with_the_trainer_takes_the_tree_along(tmp_path, which):
    program = [sys.executable, "-c", TRAINER.format(end=""), str(tmp_path), SPREAD + STAY]
    with subprocess.Popen(program, start_new_session=True) as trainer:
        found = pids(tmp_path)
        inner = parent_of(found[0])
        kill(trainer.pid, inner if which == "supervisor" else parent_of(inner))
    wait_for(lambda: not alive(found))


@pytest.mark.parametrize("which", GUARDIANS)
def test_a_supervisor_that_is_stopped_does_not_hold_up_the_end(start, tmp_path, monkeypatch, which):
    monkeypatch.setattr(process_module, "KILLING", 0.5)
    server = start()
    found = pids(tmp_path)
    os.kill(guardian(server, which), signal.SIGSTOP)
    assert server.end(0.1) == ("was killed by SIGKILL" if which == "supervisor" else "was killed by SIGTERM")
    assert not alive(found)


@pytest.mark.parametrize("which", GUARDIANS)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_supervisor_that_is_asked_to_end_ends_the_tree(start, tmp_path, number, which):
    server = start()
    found = pids(tmp_path)
    os.kill(guardian(server, which), number)
    wait_for(lambda: not server.running)
    assert not alive(found) and server.returncode == -signal.SIGTERM


@pytest.mark.parametrize(
    "end",
    [
        "os.kill(os.getpid(), 9)",
        "os.fork() and os.kill(os.getpid(), 9)",  # a copy of it lives on, and holds its end of the channel
        "sys.exit()",
        "raise RuntimeError('a bug')",
    ],
)
def test_a_trainer_that_goes_takes_the_server_along(tmp_path, end):
    program = [sys.executable, "-c", TRAINER.format(end=end), str(tmp_path), SPREAD + (DEAF if "exit" in end else STAY)]
    with subprocess.Popen(program, stderr=subprocess.DEVNULL, start_new_session=True) as trainer:
        try:
            found = pids(tmp_path)
            trainer.wait(30)
            wait_for(lambda: not alive(found))
        finally:
            with suppress(ProcessLookupError):
                os.killpg(trainer.pid, signal.SIGKILL)


def test_the_supervisor_sleeps_while_nothing_happens(start, tmp_path):
    server = start()
    pids(tmp_path)
    guardians = [guardian(server, which) for which in GUARDIANS]

    def wakings():
        status = "".join(Path(f"/proc/{pid}/status").read_text() for pid in guardians)
        return sum(int(line.split()[1]) for line in status.splitlines() if line.startswith("voluntary_ctxt"))

    before = wakings()
    with pytest.raises(TimeoutError):
        server._ended.result(1)
    assert wakings() - before <= 2


def test_the_supervisor_buries_orphans(tmp_path):
    """Children of children that have ended would be zombies for as long as the server runs."""
    orphans = "import os, time\nfor _ in range(5):\n    if os.fork() == 0:\n        os.fork(); os._exit(0)\n"
    code = orphans + f"    os.wait()\nopen({str(tmp_path / 'done')!r}, 'w').close(); time.sleep(600)"
    server = ServerProcess(Command([sys.executable, "-S", "-c", code]), tmp_path / "log", "toy")
    try:
        wait_for((tmp_path / "done").exists)
        inner = parent_of(server.pid)
        wait_for(lambda: [one.pid for one in supervisor.processes() if one.parent == inner] == [server.pid])
    finally:
        server.end(0)


def test_who_is_below_whom():
    line = [supervisor.Process(pid, pid // 2, 1, False) for pid in range(1, 16)]
    assert supervisor.below([3], line) == {6, 7, 12, 13, 14, 15}
    assert supervisor.below([9], line) == set()
    circle = [supervisor.Process(1, 2, 1, False), supervisor.Process(2, 1, 1, False)]
    assert supervisor.below([1], circle) == {1, 2}
