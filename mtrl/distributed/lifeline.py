"""Detection of lost ranks: a thread on every rank that ends the job soon after any rank is lost."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from enum import IntEnum

import torch
import torch.distributed as dist

BEAT = 2.0
"""Interval between two heartbeats, in seconds."""
NOTE_BYTES = 1024
LOSSES = (RuntimeError, ValueError)
"""Exceptions that sending and receiving raise when the other rank or the group is lost."""


class Note(IntEnum):
    """Kind of message that two ranks exchange with a heartbeat."""

    ALIVE = 0
    FAREWELL = 1
    ENDED = 2
    """The job has ended; the text is the reason."""
    SIGNAL = 3
    """The follower received a signal to stop; the text is the signal's name."""


class Lifeline:
    """Heartbeats in a thread: the leader sends a note to every follower and each answers, independent of the other
    threads of a rank.

    A rank that dies closes its connections, which its peers notice at once; a rank that hangs, or whose machine is
    lost, does not answer within the time limit. In both cases the leader sends the reason to all others, and each rank
    calls its `on_end` in this thread, because the main thread may be stuck in a collective that never returns. Only the
    first reason counts on each rank, whether the rank found it itself or received it.
    """

    def __init__(self, rank: int, size: int, group: dist.ProcessGroup, beat: float, on_end: Callable[[str], None]):
        self.rank, self.size, self.group, self.beat, self.on_end = rank, size, group, beat, on_end
        self._reason: str | None = None
        self._signal: str | None = None
        self._is_closing = False
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._follow if rank else self._lead, name="lifeline", daemon=True)
        self._thread.start()

    def fail(self, reason: str) -> None:
        """End the job from this rank: send the reason to the others, which takes at most one heartbeat interval."""
        self._claim(reason)
        self._wake.set()
        self._thread.join(2 * self.beat)

    def pass_on(self, name: str) -> None:
        """Send the leader the name of a signal that asked this follower to stop."""
        self._signal = name

    def verdict(self) -> str | None:
        """Return the reason why the job ends, waiting for up to three heartbeats; None if it is not known by then."""
        self._thread.join(3 * self.beat)
        return self._reason

    def close(self) -> None:
        """End the heartbeats of a finished job: the leader sends a farewell, and followers wait for it."""
        self._is_closing = True
        self._wake.set()
        # The leader would report a follower that leaves first as lost.
        self._thread.join(None if self.rank and self._reason is None else 2 * self.beat)

    @property
    def is_stuck(self) -> bool:
        """Whether, after `close`, the thread still waits for a rank that hangs."""
        return self._thread.is_alive()

    def _claim(self, reason: str) -> bool:
        """Store the reason unless there is one already; return whether it was stored."""
        with self._lock:
            if self._reason is not None:
                return False
            self._reason = reason
            return True

    def _lead(self) -> None:
        while not (self._reason or self._is_closing):
            self._wake.wait(self.beat)
            for rank in range(1, self.size):
                if (found := self._ask(rank)) and self._claim(found):
                    self._notify_all(Note.ENDED, found, but=rank)
                    self.on_end(found)
                    return
        if self._reason:
            self._notify_all(Note.ENDED, self._reason)
        else:
            self._notify_all(Note.FAREWELL, "")

    def _ask(self, rank: int) -> str | None:
        """Exchange one heartbeat with a follower. Return the reason if the job must end, else None."""
        try:
            self._send(rank, Note.ALIVE, "")
            note, text = self._receive(rank)
        except LOSSES as error:
            return f"rank {rank} is lost ({shortened(error)})"
        if note == Note.SIGNAL:
            os.kill(os.getpid(), signal.Signals[text])  # handled as if this process had received it
        return text if note == Note.ENDED else None

    def _notify_all(self, note: Note, text: str, but: int = 0) -> None:
        """Send the last note to all followers except `but`. A follower that does not receive it within one heartbeat
        interval notices that the leader is lost."""
        message = _written(note, text)
        with suppress(*LOSSES):
            sent = [dist.isend(message, rank, self.group) for rank in range(1, self.size) if rank != but]
            for work in sent:
                with suppress(*LOSSES):
                    work.wait(timedelta(seconds=self.beat))  # type: ignore[union-attr]  # None outside of the group

    def _follow(self) -> None:
        while True:
            try:
                note, text = self._receive(0)
            except LOSSES as error:
                note, text = Note.ENDED, f"the leader is lost ({shortened(error)})"
            if note == Note.ENDED and not self._is_closing and self._claim(text):
                self.on_end(text)
            if note != Note.ALIVE:
                return
            with suppress(*LOSSES):  # the next receive raises it again
                if self._answer() == Note.ENDED:
                    return

    def _answer(self) -> Note:
        """Send the leader the state of this rank; return the kind of note that was sent."""
        reason, (name, self._signal) = self._reason, (self._signal, None)
        if reason is not None:
            note, text = Note.ENDED, reason
        elif name is not None:
            note, text = Note.SIGNAL, name
        else:
            note, text = Note.ALIVE, ""
        self._send(0, note, text)
        return note

    def _send(self, rank: int, note: Note, text: str) -> None:
        dist.send(_written(note, text), rank, self.group)

    def _receive(self, rank: int) -> tuple[Note, str]:
        message = torch.empty(NOTE_BYTES, dtype=torch.uint8)
        dist.recv(message, rank, self.group)
        kind, *text = message.tolist()
        return Note(kind), bytes(text).rstrip(b"\0").decode(errors="ignore")


def _written(note: Note, text: str) -> torch.Tensor:
    message = bytes([note]) + text.encode()[: NOTE_BYTES - 1]
    return torch.frombuffer(bytearray(message.ljust(NOTE_BYTES, b"\0")), dtype=torch.uint8)


def is_of_network(error: BaseException) -> bool:
    """Return whether an exception comes from a lost connection between ranks, and not from an error in one of them."""
    return isinstance(error, RuntimeError) and bool(
        isinstance(error, dist.DistError) or re.search(r"gloo/|NCCL|ProcessGroup|Connection (closed|reset)", str(error))
    )


def shortened(error: BaseException) -> str:
    """Return the first line of an error message of gloo or NCCL, without its source file and advice."""
    first = next(iter(str(error).splitlines()), "") or type(error).__name__
    return re.sub(r"^\[\S+\]\s*", "", first).partition(". This is typically")[0]
