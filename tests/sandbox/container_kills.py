"""Drill: kill a process that runs containers again and again, and count the containers that are left.

    python -m tests.sandbox.container_kills 50
    python -m tests.sandbox.container_kills 50 docker

Each process starts two containers in two threads and runs commands in them, and two others wait, until SIGKILL ends it
at a moment that the drill draws: during a start, between two commands, or during one.
"""

import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.container_root import IMAGE, need_engine

PROGRAM = """
import sys, threading
from mtrl.sandbox.container import ContainerLimits
from mtrl.sandbox.engine_container import engine_path
from mtrl.sandbox.container_supervisor import owner_label
from mtrl.sandbox.warm_containers import ContainerKind, WarmContainer, warm_containers

print(owner_label(engine_path(sys.argv[1])), flush=True)

def work():
    kind = ContainerKind(sys.argv[1], sys.argv[2], ContainerLimits(memory="64m", processes=32))
    container = WarmContainer(kind, warm_containers(2))
    container.start()
    print("started", flush=True)
    while True:
        container.run("sleep 0.2; echo x > /tmp/x", 5)

threads = [threading.Thread(target=work) for _ in range(2)]
for thread in threads:
    thread.start()
"""
MOST_SECONDS = 60.0
"""Maximum time for the supervisor to remove the containers of a killed process, in seconds."""


def containers(engine, label):
    """Names of the containers with a label."""
    command = [engine, "ps", "-aq", "--filter", f"label={label}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


def supervisors(label):
    """Ids of the processes that have the label among their arguments."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if label.encode() in entry.read_bytes():
                found.append(int(entry.parent.name))
        except OSError:
            continue
    return found


def kill_once(engine, seconds, started=0):
    """Kill a process `seconds` seconds after it has started so many containers. Return the number of containers that it
    had then, and the number that is left when its supervisor has ended."""
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, engine, IMAGE], stdout=subprocess.PIPE, text=True)
    label = process.stdout.readline().strip()
    for _ in range(started):
        process.stdout.readline()
    time.sleep(seconds)
    before = len(containers(engine, label))  # before the kill, after which the supervisor removes them at once
    process.kill()
    process.wait()
    deadline = time.monotonic() + MOST_SECONDS
    while supervisors(label) and time.monotonic() < deadline:
        time.sleep(0.2)
    return before, len(containers(engine, label))


def main(kills, engine="podman"):
    with tempfile.TemporaryDirectory() as folder:
        need_engine(engine, Path(folder))
    moments = random.Random(0)
    found = [kill_once(engine, moments.uniform(0.0, 4.0)) for _ in range(kills)]
    print(f"{kills} kills with {engine}, {sum(before for before, _ in found)} containers at the kills, ", end="")
    print(f"{sum(left for _, left in found)} containers left")


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
