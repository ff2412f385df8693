"""Signals that ask a run to stop: the leader finishes its step and saves, followers pass them on to it."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from mtrl.distributed.launch import is_launched
from mtrl.errors import EndedAtOnce

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""What ends jobs politely: machines that are taken away, schedulers, Ctrl-C, and SLURM's `--signal=USR1@SECONDS`."""


class Interrupt:
    """Remembers that the run was asked to stop; a second signal raises `EndedAtOnce`::

        with Interrupt() as interrupt:
            while not interrupt.requested: …

    Under `torchrun` only the first signal counts: the scheduler and torchrun both send them to every rank, so a second
    one says nothing new, and torchrun kills whatever takes longer than its `--shutdown-timeout`.
    """

    def __init__(self, on_signal: Callable[[], object] = lambda: None) -> None:
        """`on_signal` is called at the first signal, in its handler."""
        self.on_signal = on_signal
        self.requested: str | None = None
        """Name of the signal, once there was one."""
        self._previous: dict[int, Any] = {}
        self._is_telling = False
        self._second: int | None = None

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                self._previous[number] = signal.signal(number, self._remember)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if self.requested is None:
            self.requested = signal.Signals(number).name
            self._tell()
        elif is_launched():
            return
        elif self._is_telling:  # an exception in the middle of a line would leave the console without its buffer
            self._second = number
        else:
            raise EndedAtOnce(number)

    def _tell(self) -> None:
        self._is_telling = True
        try:
            self.on_signal()
        finally:
            self._is_telling = False
        if self._second is not None:
            raise EndedAtOnce(self._second)


class Relay:
    """Calls `on_signal` with the name of the first signal and does nothing else about any::

        with Relay(tell_the_leader):
            follow()

    It does so at once and in a thread of its own, since Python handles signals in the main one only, and between its
    steps: a follower's is inside of a collective nearly always. To be entered in the main thread.
    """

    def __init__(self, on_signal: Callable[[str], None]):
        self.on_signal = on_signal
        self._previous: dict[int, Any] = {}
        self._ear, self._mouth = socket.socketpair()
        self._mouth.setblocking(False)  # as `set_wakeup_fd` wants it

    def __enter__(self) -> Relay:
        self._previous = {number: signal.signal(number, lambda *_: None) for number in SIGNALS}
        self._wakeup = signal.set_wakeup_fd(self._mouth.fileno(), warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._listen, name="relay", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._mouth.close()
        self._thread.join()
        self._ear.close()

    def _listen(self) -> None:
        while number := self._ear.recv(1):
            if number[0] in SIGNALS:
                self.on_signal(signal.Signals(number[0]).name)
                return
