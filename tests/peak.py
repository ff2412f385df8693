"""`Peak` measures the maximum memory and number of the child processes of a test."""

import os
import threading
from pathlib import Path

from mtrl.sandbox.execution import process_tree, proportional_memory


class Peak:
    """Context manager that samples the processes below this process, except those that existed before.

    Attributes:
        bytes: maximum memory of these processes together, with shared pages divided by their number of processes.
        processes: maximum number of these processes.

    A worker of pytest-xdist may have started the server of `tests/forked.py`, which is one of the processes before.
    A child between fork and exec has the memory of this process, which may be gigabytes: its memory is not counted.
    """

    def __enter__(self):
        self.bytes = self.processes = 0
        self._before = process_tree(os.getpid())
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def _sample(self):
        while not self._over.wait(0.02):
            new = process_tree(os.getpid()) - self._before
            self.processes = max(self.processes, len(new))
            self.bytes = max(self.bytes, sum(proportional_memory(pid) for pid in new if _has_program_of_its_own(pid)))

    def __exit__(self, *_):
        self._over.set()
        self._thread.join()


def _has_program_of_its_own(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes() != Path("/proc/self/cmdline").read_bytes()
    except OSError:  # the process has ended
        return False
