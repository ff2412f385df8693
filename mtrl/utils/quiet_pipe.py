"""A quiet end for a program whose output is no longer read, as in `mtrl train --help | head -1`."""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

STATUS = 128 + signal.SIGPIPE
"""Exit status, which shells show for programs that SIGPIPE ends."""


@contextmanager
def quiet_pipe() -> Iterator[None]:
    """Context that exits with `STATUS` and without a message if the reader of stdout has ended. A `BrokenPipeError` of
    another file is raised."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        if not _has_no_reader():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # takes what Python flushes at its exit
        raise SystemExit(STATUS) from None


def _has_no_reader() -> bool:
    """Return whether stdout is a pipe that no process reads any more."""
    with suppress(OSError, ValueError):  # stdout has no descriptor, or is closed
        poll = select.poll()
        poll.register(sys.stdout, 0)
        return any(event & select.POLLERR for _, event in poll.poll(0))
    return False
