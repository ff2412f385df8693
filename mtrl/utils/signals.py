"""Signals that ask a run to stop: the leader finishes its step and saves; followers forward signals to the leader."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from mtrl.errors import EndedAtOnce
from mtrl.utils.process import is_launched

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""Signals that ask a job to end: from preempted machines, schedulers, Ctrl-C, and SLURM's `--signal=USR1@SECONDS`."""


class Interrupt:
    """Records the first signal that asks the run to stop; a second signal raises `EndedAtOnce`::

        with Interrupt() as interrupt:
            while not interrupt.requested: …

    Under `torchrun` only the first signal counts: the scheduler and torchrun both send signals to every rank, so a
    second one has no separate meaning, and torchrun kills ranks that take longer than its `--shutdown-timeout`.
    """

    def __init__(self, on_signal: Callable[[], object] = lambda: None) -> None:
        """`on_signal` is called at the first signal, within the signal handler."""
        self.on_signal = on_signal
        self.requested: str | None = None
        """Name of the first signal; None before it."""
        self._previous: dict[int, Any] = {}
        self._is_reporting = False
        self._second: int | None = None
        self._is_ending = False

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.requested is None:
            self.requested = signal.Signals(number).name
            self._report()
        elif is_launched():
            return
        elif self._is_reporting:  # an exception while the console writes a line would corrupt its buffer
            self._second = number
        else:
            self._end(number)

    def _end(self, number: int) -> None:
        """Raise `EndedAtOnce`: from the event loop if one runs, because an exception of a signal handler may make the
        loop lose the callback that it is about to call, and the end of the loop then waits for the task of this
        callback for ever. A further signal raises it here, for a loop that is blocked."""
        import asyncio  # here, because commands that only print import this module

        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            raise EndedAtOnce(number) from None
        if self._is_ending:
            raise EndedAtOnce(number)
        self._is_ending = True
        loop.call_soon_threadsafe(_raise, EndedAtOnce(number))

    def _report(self) -> None:
        self._is_reporting = True
        try:
            self.on_signal()
        finally:
            self._is_reporting = False
        if self._second is not None:
            self._end(self._second)


def _raise(error: BaseException) -> None:
    raise error


class Relay:
    """Calls `on_signal` with the name of the first signal, and ignores all signals otherwise::

        with Relay(forward_to_leader):
            follow()

    The call is made at once in a separate thread. Python runs signal handlers only in the main thread, between two
    bytecode instructions, and a follower's main thread is nearly always inside a collective. The context must be
    entered in the main thread.
    """

    def __init__(self, on_signal: Callable[[str], None]):
        self.on_signal = on_signal
        self._previous: dict[int, Any] = {}
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)  # required by `set_wakeup_fd`

    def __enter__(self) -> Relay:
        self._previous = {number: signal.signal(number, lambda *_: None) for number in SIGNALS}
        self._wakeup = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._listen, name="relay", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._writer.close()
        self._thread.join()
        self._reader.close()

    def _listen(self) -> None:
        while number := self._reader.recv(1):
            if number[0] in SIGNALS:
                self.on_signal(signal.Signals(number[0]).name)
                return
