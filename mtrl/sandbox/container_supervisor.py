"""The supervisor of this process's containers: a process that removes them after this process has ended in any way.

    python -I -S container_supervisor.py PROGRAM LABEL

Containers are no children of the process that starts them, so no signal of the kernel ends them with it. Every
container gets a label that is unique to its process. The supervisor reads the end of its standard input when the
process has ended, also after SIGKILL, and removes all containers with the label. A child that is about to execute a
client holds the other end of this pipe until it does, so at the end of input every client that can still create a
container is in /proc. A moment later, when the kernel has set up the client's memory, the label is among its arguments
there; the supervisor waits for these clients, and looks several times (`EMPTY_LOOKS`). This file imports only the
standard library, because it is run by its path.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from contextlib import suppress
from pathlib import Path

CLIENT_SECONDS = 300.0
"""Time limit of one call of the container program, in seconds."""
LONGEST_START = 1500.0
"""Maximum number of seconds that the supervisor waits for clients that create containers: more than a pull may take."""
LONGEST_SILENCE = 300.0
"""Number of seconds without an answer of the engine after which the supervisor ends if no client is left; a daemon that
hangs adds up to `CLIENT_SECONDS`. A daemon that restarts answers sooner, and a container that is left ends by
itself (`ContainerLimits.seconds`)."""
EMPTY_LOOKS = 3
"""Number of looks in a row without a container or a client, after which the supervisor ends. A client that has just
started shows its arguments a moment later, and a daemon may create the container of a client that has been killed."""
EMPTY_PAUSE = 1.5
"""Seconds between two of these looks."""
PAUSE = 0.2
"""Seconds between two looks at the containers that are left."""
FAILURE_PAUSE = 2.0
"""Seconds to the next look after an engine that did not answer."""

_lock = threading.Lock()
_labels: dict[str, str] = {}
"""Label of this process's containers, by container program."""
_pipes: list[int] = []
"""File descriptors whose end tells the supervisors that this process has ended."""


def owner_label(program: str) -> str:
    """Return the label for containers of this process, in the form `name=value`. The first call for a container program
    starts its supervisor.

    Args:
        program: path of the container program, docker or podman.
    """
    with _lock:
        if program not in _labels:
            label = f"mtrl.owner={uuid.uuid4().hex}"
            theirs, ours = os.pipe()
            subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, program, label],
                stdin=theirs,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # signals for the group of this process should not reach it
            )
            os.close(theirs)
            _pipes.append(ours)
            _labels[program] = label
        return _labels[program]


def _forget() -> None:
    """Leave the supervisors to the parent, in a process that was forked."""
    global _lock
    _lock = threading.Lock()
    while _pipes:
        os.close(_pipes.pop())
    _labels.clear()


os.register_at_fork(after_in_child=_forget)


def remove_all(program: str, label: str) -> bool:
    """Remove the containers with the label, until none is left and no client can still create one. Return whether that
    was reached before the engine was silent for `LONGEST_SILENCE` seconds, and within `LONGEST_START` seconds."""
    begun = answered = time.monotonic()
    empty = 0
    while (now := time.monotonic()) < begun + LONGEST_START:
        waiting = has_clients(label)  # before the look at the containers, since a client may end in between
        try:
            found = _call(program, "ps", "-aq", "--filter", f"label={label}").split()
            answered = time.monotonic()
        except (OSError, subprocess.SubprocessError):
            if not waiting and now > answered + LONGEST_SILENCE:
                return False
            time.sleep(FAILURE_PAUSE)
            continue
        empty = 0 if found or waiting else empty + 1
        if empty == EMPTY_LOOKS:
            return True
        if found:
            with suppress(OSError, subprocess.SubprocessError):  # the next round tries again
                _call(program, "rm", "-f", *found)
        time.sleep(EMPTY_PAUSE if empty else PAUSE)
    return False


def has_clients(label: str) -> bool:
    """Return whether another process of this machine has the label among its arguments."""
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with suppress(OSError):  # the process has ended meanwhile
                if label.encode() in Path(entry.path, "cmdline").read_bytes():
                    return True
    return False


def _call(*command: str) -> str:
    """Return the output of a container program.

    Raises:
        subprocess.SubprocessError: the program failed or took too long.
    """
    stdin = subprocess.DEVNULL
    return subprocess.run(
        command, stdin=stdin, capture_output=True, text=True, timeout=CLIENT_SECONDS, check=True
    ).stdout


def main(program: str, label: str) -> None:
    """Wait for the end of standard input, and remove all containers with the label."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while os.read(0, 4096):
        pass
    remove_all(program, label)


if __name__ == "__main__":
    main(*sys.argv[1:])
