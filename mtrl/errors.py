"""Exceptions that end a program: errors that a user is meant to read, and requests to stop.

The message of a `UserError` is one sentence that names the key, the value and the fix.
"""

import errno
import os
import signal

DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
"""Numbers of the errors by which a file system reports that it is full, over a quota, or read-only."""


class UserError(ValueError):
    """Bad input from a user. The entry points print the message and exit with status 2, without a traceback."""


class RunEndedError(UserError):
    """The run ends before its last step, and the policy as trained so far should be saved."""


class PrunedError(RunEndedError):
    """The sweep stops the run, because other runs of the sweep do better. The run is saved and is not a failure."""

    def __init__(self, reason: str, score: float):
        """`score` is the last measured value of the sweep's objective."""
        super().__init__(reason)
        self.score = score


class BackendError(RuntimeError):
    """What an environment runs on has failed, such as the daemon of its containers, its sandbox or the server of its
    searches, and not an action of the model. The episode is invalid, so a tool that raises this error fails it."""


class Interrupted(SystemExit):
    """A signal ended the run after it was saved.

    The exit status is 130 after Ctrl-C (SIGINT), the convention of shells, and 75 after any other signal: `EX_TEMPFAIL`
    of sysexits.h, "try again later", which job scripts can distinguish from a failure.
    """

    def __init__(self, name: str):
        """`name` is the name of the signal, such as SIGTERM."""
        super().__init__(130 if name == signal.SIGINT.name else os.EX_TEMPFAIL)
        self.signal = name


class EndedAtOnce(KeyboardInterrupt):
    """A signal, usually the second one, ended the run before it could save. The message, if not empty, is a sentence
    for the user; the exit status is 128 + the number of the signal, the convention of shells."""

    def __init__(self, number: int, message: str = ""):
        super().__init__(message)
        self.number = signal.Signals(number)


class JobLost(SystemExit):
    """Another rank of the job is unreachable or has failed: this rank ends with one line on stderr.

    The exit status is 1.
    """

    def __init__(self, rank: int, size: int, reason: str):
        super().__init__(
            f"rank {rank} of {size}: {reason}; the job ends, resume=latest goes on from the last checkpoint"
        )


def disk_error(error: BaseException) -> int | None:
    """Return the number, one of `DISK_ERRORS`, of the error by which a file system refused to write; None for any other
    error.

    `safetensors` has an error class of its own, which is recognised by its text. `torch.save` raises an error about its
    archive while it handles the one of the file system.
    """
    if isinstance(error, RuntimeError) and "inline_container" in str(error) and error.__context__ is not None:
        error = error.__context__
    number = error.errno if isinstance(error, OSError) else None
    if type(error).__name__ == "SafetensorError":
        number = next((each for each in DISK_ERRORS if f"os error {each}" in str(error)), None)
    return number if number in DISK_ERRORS else None


def unwritable(error: Exception) -> str | None:
    """Return the sentence about a file whose disk is full or read-only; None for any other error.

    An error names its file only where the file could not be opened.
    """
    number = disk_error(error)
    if number is None:
        return None
    file = getattr(error, "filename", None) or "the output"
    return f"{os.fsdecode(file)} cannot be written ({os.strerror(number)}); free some space or name another folder"


def missing_extra(package: str, extra: str) -> UserError:
    """Return the error for an optional package that is not installed; it names the extra that contains the package."""
    return UserError(f"{package} is not installed; install it with: pip install 'mtrl-agents[{extra}]'")
