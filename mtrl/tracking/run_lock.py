"""One process at a time leads a run in a folder."""

from __future__ import annotations

import fcntl
import os

from mtrl.errors import UserError
from mtrl.tracking.run_dir import RunDir


class RunLock:
    """Held while a run writes into its folder; the system frees it when the process ends, however it does::

        with RunLock(run):
            ...

    Two would overwrite each other's checkpoints: whoever resumes a run may not know that it has not ended. It is a lock
    on `run.log`, so that nothing else lies in the folder; file systems without locks are not watched over.
    """

    def __init__(self, run: RunDir):
        self.run = run
        self._file: int | None = None

    def __enter__(self) -> RunLock:
        """
        Raises:
            UserError: another process holds it.
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
