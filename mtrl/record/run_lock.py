"""Lock of the folder of a run or of an evaluation: only one process at a time writes into it."""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import suppress

from mtrl.errors import UserError
from mtrl.record.run_dir import RunDir

READER_SECONDS = 0.1
"""Seconds between the two attempts to lock: a reader that asks `is_held` has the lock for an instant."""


class RunLock:
    """Lock that a process holds while its run writes into the folder. The system frees it whenever the process ends::

        with RunLock(run):
            ...

    Two processes would overwrite each other's checkpoints, and a user who resumes a run may not know that it still
    runs. The lock is on `run.log`, so it needs no file of its own. On file systems without locks it has no effect.
    """

    def __init__(self, run: RunDir, in_use: str = ""):
        """`in_use`: error message if another process holds the lock; default: that of a run."""
        self.run = run
        self.in_use = in_use or (
            f"run_dir={run} is being written by a process that has not ended, perhaps a rank whose torchrun was "
            "killed; end it first, or name another folder"
        )
        self._file: int | None = None

    def __enter__(self) -> RunLock:
        """
        Raises:
            UserError: Another process holds the lock.
        """
        self._file = os.open(self.run.log, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            with suppress(BlockingIOError):
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return self
            time.sleep(READER_SECONDS)
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.__exit__()
            raise UserError(self.in_use) from error
        except OSError:
            pass
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def is_held(run: RunDir) -> bool:
    """Whether a process of this machine leads a run or an evaluation in the folder. On file systems without locks the
    answer is False. Neither a pipe nor a link in the place of `run.log` is followed."""
    try:
        file = os.open(run.log, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(file)
    return False
