"""How a program ends: by an error that a user is meant to read, or because it was asked to stop.

A `UserError` is one sentence that names the key, the value and the fix.
"""

import os
import signal


class UserError(ValueError):
    """Bad input from a user. The entry points print its sentence and exit with status 2, without a traceback."""


class RunEndedError(UserError):
    """The run ends before its last step; what it has learnt so far is worth keeping."""


class Interrupted(SystemExit):
    """A signal ended the run after it was saved.

    The exit status is 130 after Ctrl-C (SIGINT), as shells have it, and 75 after any other signal: `EX_TEMPFAIL` of
    sysexits.h, "run me again", which job scripts can tell from a failure.
    """

    def __init__(self, name: str):
        """`name` is that of the signal, such as SIGTERM."""
        super().__init__(130 if name == signal.SIGINT.name else os.EX_TEMPFAIL)
        self.signal = name


class JobLost(SystemExit):
    """Another rank of the job is gone or has failed, so this one ends: one line on stderr, exit status 1."""

    def __init__(self, rank: int, size: int, reason: str):
        super().__init__(
            f"rank {rank} of {size}: {reason}; the job ends, resume=latest goes on from the last checkpoint"
        )


def missing_extra(package: str, extra: str) -> UserError:
    """The error for an optional package that is not installed; it names the extra that brings it."""
    return UserError(f"{package} is not installed; install it with: pip install 'mtrl[{extra}]'")
