"""What the children of a test take at most, for bombs whose limits are to hold."""

import os
import threading

from mtrl.sandbox import execution


class Peak:
    """The most memory and processes below this process while it is open, without what was there before.

    A worker of the tests may have a server of its own beside it (`tests/forked.py`), which is no part of a bomb.
    """

    def __enter__(self):
        self.bytes = self.processes = 0
        self._before = execution._family(os.getpid())
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def _sample(self):
        while not self._over.wait(0.02):
            family = execution._family(os.getpid()) - self._before
            self.processes = max(self.processes, len(family))
            self.bytes = max(self.bytes, sum(map(execution._proportional, family)))

    def __exit__(self, *_):
        self._over.set()
        self._thread.join()
