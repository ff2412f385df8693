"""The followers of a live run: one thread per tracker. The run does not wait for them before its end."""

from __future__ import annotations

import shlex
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

from mtrl.errors import UserError
from mtrl.record.metrics import unfinished_row
from mtrl.trackers.follower import Follower
from mtrl.utils.text import one_line

CLOSE_SECONDS = 60.0
"""Maximum seconds that the end of a run waits for its trackers."""
SILENT_SECONDS = 20.0
"""Maximum seconds that the end of a run waits for a tracker at which nothing arrives."""
FIRST_DELAY, LONGEST_DELAY = 2.0, 120.0
"""First and largest delay between attempts, in seconds; each delay is twice the previous one."""


class Followers:
    """Threads that send a run to its trackers. Call `poke` when the folder has new content, and `close` at the end;
    neither raises, and `poke` does not wait for a server.

    The thread that calls `poke` and `close` prints the warnings, because a console belongs to one thread.
    """

    def __init__(self, followers: list[Follower], warn: Callable[[str], Any], is_run: bool = True):
        """`is_run`: this process is the run itself, so the run is over when the followers are closed."""
        self._warn = warn
        self._messages: SimpleQueue[str] = SimpleQueue()
        self._threads = [_Thread(follower, self._messages.put, is_run) for follower in followers]
        for thread in self._threads:
            thread.start()

    def poke(self) -> None:
        """Notify the threads of new content, and print their warnings."""
        for thread in self._threads:
            thread.poked.set()
        self._print_messages()

    def close(self) -> None:
        """Send the rest, within `CLOSE_SECONDS` at most. Then warn of a last row without a line end, and of unsent
        pieces with the command that sends them later."""
        began = time.monotonic()
        for thread in self._threads:
            thread.close()
        for thread in self._threads:
            while thread.is_alive() and thread.is_worth_waiting(began):
                thread.join(0.1)
        self._print_messages()
        for path in dict.fromkeys(thread.follower.folder.run.dir.metrics for thread in self._threads):
            if sentence := unfinished_row(path):
                self._warn(sentence)
        for thread in self._threads:
            if thread.is_alive() or thread.has_failed:
                self._warn(thread.unsent())

    def urls(self) -> dict[str, str]:
        """Return the address of the run by tracker name, as far as it is known by now."""
        return {thread.follower.backend.name: thread.follower.url() for thread in self._threads}

    def hints(self) -> dict[str, str]:
        """Return the command that shows the run by tracker name, for trackers that need one."""
        found = {thread.follower.backend.name: thread.follower.hint() for thread in self._threads}
        return {name: hint for name, hint in found.items() if hint}

    def _print_messages(self) -> None:
        while True:
            try:
                self._warn(self._messages.get_nowait())
            except Empty:
                return


def error_line(error: Exception) -> str:
    """Return the error of a tracker in one line."""
    return one_line(error if isinstance(error, UserError) else f"{type(error).__name__}: {error}", 400)


class _Thread(threading.Thread):
    """Thread that sends when it is poked, and after a failure when its delay is over."""

    def __init__(self, follower: Follower, report: Callable[[str], Any], is_run: bool):
        super().__init__(name=f"mtrl-{follower.backend.name}", daemon=True)
        self.follower, self._report, self._is_run = follower, report, is_run
        self.poked, self._closing = threading.Event(), threading.Event()
        self.has_failed = False
        self._delay = 0.0
        self._refused = 0
        self.poked.set()

    def is_worth_waiting(self, began: float) -> bool:
        now, heard = time.monotonic(), max(began, self.follower.receipts.arrived_at)
        return now < began + CLOSE_SECONDS and now < heard + SILENT_SECONDS

    def close(self) -> None:
        self._closing.set()
        self.poked.set()

    def run(self) -> None:
        while not self._closing.is_set():
            self.poked.wait()
            self.poked.clear()
            if not self._closing.is_set():
                self._attempt(self.follower.advance)
            if self._delay:
                self._closing.wait(self._delay)
                self.poked.set()
        self._attempt(self._finish)
        if not self.has_failed:
            self.follower.release()

    def _finish(self) -> None:
        self.follower.advance(final=True, is_over=self._is_run)
        self.follower.close()

    def unsent(self) -> str:
        """Return a sentence about the unsent pieces, with the command that sends them."""
        try:
            left = (
                ", ".join(f"{number} {kind}" for kind, number in self.follower.left().items()) or "the end of the run"
            )
        except Exception:  # the thread may be reading the same files
            left = "some pieces"
        command = shlex.join(["mtrl", "track", str(self.follower.folder.run.path)])
        return f"{self.follower.backend.name} has not received the whole run (left: {left}); send it with: {command}"

    def _attempt(self, act: Callable[[], Any]) -> None:
        name = self.follower.backend.name
        try:
            act()
        except Exception as error:  # no error of a tracker ends the run
            if not self.has_failed:
                self._report(
                    f"{name} cannot be reached, and the run continues; the rest is sent later ({error_line(error)})"
                )
            self.has_failed = True
            self._delay = min(LONGEST_DELAY, 2 * self._delay or FIRST_DELAY)
            return
        if self.has_failed:
            self._report(f"{name} answers again and has received all missing pieces")
        self.has_failed, self._delay = False, 0.0
        self._report_refused(name)

    def _report_refused(self, name: str) -> None:
        refused = len(self.follower.receipts.refused)
        if refused > self._refused:
            self._report(self.follower.refusals())
        self._refused = refused
