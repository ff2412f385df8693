"""Lock of a run's folder: only one process at a time leads a run in it."""

from __future__ import annotations

import fcntl
import os

from mtrl.errors import UserError
from mtrl.record.run_dir import RunDir


class RunLock:
    """Lock that a process holds while its run writes into the folder. The system frees it whenever the process ends::

        with RunLock(run):
            ...

    Two processes would overwrite each other's checkpoints, and a user who resumes a run may not know that it still
    runs. The lock is on `run.log`, so it needs no file of its own. On file systems without locks it has no effect.
    """

    def __init__(self, run: RunDir):
        self.run = run
        self._file: int | None = None

    def __enter__(self) -> RunLock:
        """
        Raises:
            UserError: Another process holds the lock.
        """
        self._file = os.open(self.run.log, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.__exit__()
            raise UserError(
                f"run_dir={self.run} is being written by a process that has not ended, perhaps a rank whose torchrun "
                "was killed; end it first, or name another folder"
            ) from error
        except OSError:
            pass
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None
