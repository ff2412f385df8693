"""Who is still there: a thread on every rank that ends the job soon after any rank is gone."""

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
"""Seconds between two beats."""
NOTE_BYTES = 1024
LOSSES = (RuntimeError, ValueError)
"""What sending and receiving raise when the other rank is gone, or the group is."""


class Note(IntEnum):
    """What two ranks tell each other with a beat."""

    ALIVE = 0
    FAREWELL = 1
    ENDED = 2
    """The job is over; the text says why."""
    SIGNAL = 3
    """The follower was asked to stop; the text is the signal's name."""


class Lifeline:
    """The leader sends every follower a note and each answers, all the time, whatever the ranks do meanwhile.

    A rank that dies closes its connections, which its peers see at once; one that hangs, or whose machine is gone,
    does not answer within the time limit. Either way the leader tells all others why, and each calls its `on_end`, in
    this thread: the main one may be stuck in a collective that never returns. Only one reason counts per rank: the
    first that it found itself or was told.
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
        """This rank ends the job: tell the others, which takes a beat at most."""
        self._claim(reason)
        self._wake.set()
        self._thread.join(2 * self.beat)

    def pass_on(self, name: str) -> None:
        """Tell the leader that this follower was asked to stop, by the signal `name`."""
        self._signal = name

    def verdict(self) -> str | None:
        """Why the job ends, if that is known now or within the next beats."""
        self._thread.join(3 * self.beat)
        return self._reason

    def close(self) -> None:
        """The job is over: the leader says farewell, and followers wait for that."""
        self._is_closing = True
        self._wake.set()
        # A follower that leaves before the leader does would be missed.
        self._thread.join(None if self.rank and self._reason is None else 2 * self.beat)

    @property
    def is_stuck(self) -> bool:
        """Whether the thread still waits for a rank that hangs, after `close`."""
        return self._thread.is_alive()

    def _claim(self, reason: str) -> bool:
        """Whether this is the first reason."""
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
                    self._tell_all(Note.ENDED, found, but=rank)
                    self.on_end(found)
                    return
        if self._reason:
            self._tell_all(Note.ENDED, self._reason)
        else:
            self._tell_all(Note.FAREWELL, "")

    def _ask(self, rank: int) -> str | None:
        """One beat with a follower; why the job must end, if it must."""
        try:
            self._send(rank, Note.ALIVE, "")
            note, text = self._receive(rank)
        except LOSSES as error:
            return f"rank {rank} is gone ({shortened(error)})"
        if note == Note.SIGNAL:
            os.kill(os.getpid(), signal.Signals[text])  # as if it had come here
        return text if note == Note.ENDED else None

    def _tell_all(self, note: Note, text: str, but: int = 0) -> None:
        """The last note; followers that do not take it within a beat see that the leader is gone."""
        said = _written(note, text)
        with suppress(*LOSSES):
            sent = [dist.isend(said, rank, self.group) for rank in range(1, self.size) if rank != but]
            for work in sent:
                with suppress(*LOSSES):
                    work.wait(timedelta(seconds=self.beat))  # type: ignore[union-attr]  # None outside of the group

    def _follow(self) -> None:
        while True:
            try:
                note, text = self._receive(0)
            except LOSSES as error:
                note, text = Note.ENDED, f"the leader is gone ({shortened(error)})"
            if note == Note.ENDED and not self._is_closing and self._claim(text):
                self.on_end(text)
            if note != Note.ALIVE:
                return
            with suppress(*LOSSES):  # seen by the next receive
                if self._answer() == Note.ENDED:
                    return

    def _answer(self) -> Note:
        """Tell the leader how this rank is; what was told."""
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
        note = torch.empty(NOTE_BYTES, dtype=torch.uint8)
        dist.recv(note, rank, self.group)
        kind, *said = note.tolist()
        return Note(kind), bytes(said).rstrip(b"\0").decode(errors="ignore")


def _written(note: Note, text: str) -> torch.Tensor:
    said = bytes([note]) + text.encode()[: NOTE_BYTES - 1]
    return torch.frombuffer(bytearray(said.ljust(NOTE_BYTES, b"\0")), dtype=torch.uint8)


def is_of_network(error: BaseException) -> bool:
    """Whether an exception says that ranks lost each other, rather than that one of them has a fault of its own."""
    return isinstance(error, RuntimeError) and bool(
        isinstance(error, dist.DistError) or re.search(r"gloo/|NCCL|ProcessGroup|Connection (closed|reset)", str(error))
    )


def shortened(error: BaseException) -> str:
    """The first line of what gloo or NCCL said, without its source file and advice."""
    first = next(iter(str(error).splitlines()), "") or type(error).__name__
    return re.sub(r"^\[\S+\]\s*", "", first).partition(". This is typically")[0]
