"""Programs that stand in for servers with many processes, and functions that find their processes."""

import os
import signal
import sys
import time
from pathlib import Path

from mtrl.engines.server.backend import ServerCommand

SPREAD = """
import os, signal, subprocess, sys, time

def note():
    with open(sys.argv[1], "a") as file:
        file.write(f"{os.getpid()}\\n")

def sleeper(*more, **settings):
    code = f"import os, signal, time; {';'.join(more) or 'pass'}; time.sleep(600)"
    child = subprocess.Popen([sys.executable, "-S", "-c", code], **settings)
    with open(sys.argv[1], "a") as file:
        file.write(f"{child.pid}\\n")
    return child

note()
sleeper()                                                              # a child
sleeper(start_new_session=True)                                        # in a session of its own
sleeper(process_group=0)                                               # in a process group of its own
os.kill(sleeper().pid, signal.SIGSTOP)                                 # stopped
sleeper("signal.signal(signal.SIGTERM, signal.SIG_IGN)")               # deaf
sleeper("signal.pthread_sigmask(signal.SIG_SETMASK, range(1, 65))")    # more than deaf
sleeper(start_new_session=True, env={})                                # without an environment
if os.fork() == 0:                                                     # a daemon: forked twice
    os.setsid()
    if os.fork() == 0:
        note()
        sleeper(start_new_session=True)
        os.execv(sys.executable, [sys.executable, "-S", "-c", "import time; time.sleep(600)"])
    os._exit(0)
os.wait()
while True:  # until the daemon has noted itself and its child
    with open(sys.argv[1]) as file:
        if len(file.readlines()) >= 10:
            break
    time.sleep(0.01)
def be_ready():
    open(sys.argv[1] + ".ready", "w").close()

"""
STAY = "be_ready(); time.sleep(600)"
DEAF = "signal.signal(signal.SIGTERM, signal.SIG_IGN); " + STAY
COUNT = 10
"""Number of processes of a tree."""
TRAINER = """
import os, sys, time
from pathlib import Path
from mtrl.engines.server.backend import ServerCommand
from mtrl.engines.server.process import ServerProcess
folder = Path(sys.argv[1])
command = ServerCommand([sys.executable, "-S", "-c", sys.argv[2], str(folder / "pids")])
server = ServerProcess(command, folder / "log", "toy")
while not (folder / "pids.ready").exists():
    time.sleep(0.01)
{end}
time.sleep(600)
"""


def tree(folder: Path, then: str = STAY) -> ServerCommand:
    """Return a server that starts nine processes, each of a kind that is easily missed, and then runs `then`, which
    calls `be_ready` as soon as a test may send signals."""
    return ServerCommand([sys.executable, "-S", "-c", SPREAD + then, str(folder / "pids")])


def pids(folder: Path) -> list[int]:
    """Wait until all processes of the tree run, and return their ids, the server first."""
    wait_for(lambda: (folder / "pids.ready").exists())
    found = [int(line) for line in (folder / "pids").read_text().split()]
    assert len(found) == COUNT
    return found


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def alive(found: list[int]) -> list[int]:
    return [pid for pid in found if is_alive(pid)]


def wait_for(condition, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.01)


def kill(*found: int) -> None:
    for pid in found:
        os.kill(pid, signal.SIGKILL)
