"""How a program ends: by an error that a user is meant to read, or because it was asked to stop.

A `UserError` is one sentence that names the key, the value and the fix.
"""

import errno
import os
import signal
import sysconfig
import traceback
from pathlib import Path

LIBRARIES = (Path(__file__).parent, *(Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")))
"""Whatever lies outside of these is the user's own code."""
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
"""Numbers of the errors by which a file system says that it is full, over a quota, or read-only."""
LONGEST_LINE = 1_000
LONGEST_ACCOUNT = 20_000
"""Characters."""


class UserError(ValueError):
    """Bad input from a user. The entry points print its sentence and exit with status 2, without a traceback."""


class RunEndedError(UserError):
    """The run ends before its last step; what it has learnt so far is worth keeping."""


class PrunedError(RunEndedError):
    """A sweep gives the run up, because others of it do better; it is saved, and no failure."""

    def __init__(self, reason: str, score: float):
        """`score` is the objective of the sweep, as it was last measured."""
        super().__init__(reason)
        self.score = score


class Interrupted(SystemExit):
    """A signal ended the run after it was saved.

    The exit status is 130 after Ctrl-C (SIGINT), as shells have it, and 75 after any other signal: `EX_TEMPFAIL` of
    sysexits.h, "run me again", which job scripts can tell from a failure.
    """

    def __init__(self, name: str):
        """`name` is that of the signal, such as SIGTERM."""
        super().__init__(130 if name == signal.SIGINT.name else os.EX_TEMPFAIL)
        self.signal = name


class EndedAtOnce(KeyboardInterrupt):
    """A signal, as a rule the second one, ended the run before it could save. Its text, where it has one, is a sentence
    for the user; the exit status is 128 + the number of the signal, as shells have it."""

    def __init__(self, number: int, said: str = ""):
        super().__init__(said)
        self.number = signal.Signals(number)


class JobLost(SystemExit):
    """Another rank of the job is gone or has failed, so this one ends: one line on stderr, exit status 1."""

    def __init__(self, rank: int, size: int, reason: str):
        super().__init__(
            f"rank {rank} of {size}: {reason}; the job ends, resume=latest goes on from the last checkpoint"
        )


def reason(error: BaseException) -> str:
    """What went wrong, in one line, and where in the user's own code: `KeyError in vault.py, line 9: 'tag'`."""
    from mtrl.process_guard import said  # brings asyncio, which --help does without

    line = next(iter(said(error).splitlines()), "")
    if isinstance(error, ImportError | SyntaxError):
        return line  # it says the place itself
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = Path(frame.filename)
        if file.is_absolute() and not any(library in file.parents for library in LIBRARIES):
            return f"{type(error).__name__} in {file.name}, line {frame.lineno}: {line}"
    return f"{type(error).__name__}: {line}"


def account(error: BaseException) -> str:
    """What a failed episode keeps of its error: the first line says it, then comes the traceback. At most
    `LONGEST_ACCOUNT` characters, as the message may hold whatever an environment has put into it."""
    from mtrl.process_guard import guarded, said

    first = next(iter(said(error).splitlines()), "")[:LONGEST_LINE]
    with guarded():  # it shows the error too
        trace = "".join(traceback.format_exception(error))
    text = f"{type(error).__name__}: {first}\n{trace}"
    if len(text) > LONGEST_ACCOUNT:
        text = f"{text[:LONGEST_ACCOUNT]}\n[{len(text) - LONGEST_ACCOUNT} more characters were cut]"
    return text.encode(errors="replace").decode()


def unwritable(error: Exception) -> str | None:
    """The sentence about a file whose disk is full or read-only; None for any other error.

    An error names its file only where the file could not be opened. `safetensors` has an error class of its own, which
    is recognised by its text.
    """
    number = error.errno if isinstance(error, OSError) else None
    if type(error).__name__ == "SafetensorError":
        number = next((each for each in DISK_ERRORS if f"os error {each}" in str(error)), None)
    if number not in DISK_ERRORS:
        return None
    file = getattr(error, "filename", None) or "the output"
    return f"{os.fsdecode(file)} cannot be written ({os.strerror(number)}); free some space or name another folder"


def missing_extra(package: str, extra: str) -> UserError:
    """The error for an optional package that is not installed; it names the extra that brings it."""
    return UserError(f"{package} is not installed; install it with: pip install 'mtrl[{extra}]'")
