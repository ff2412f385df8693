"""The journal of the pieces that have arrived: one line per piece, intact after a kill at any instant."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any

from mtrl.record.run_dir import RunDir
from mtrl.trackers.items import Item, digest
from mtrl.utils.files import replace_text, to_strict_json


class BusyError(Exception):
    """Another process is sending this run to this destination."""


class Receipts:
    """Journal of the pieces of a run that a destination has, and of the names that the destination gave the run.

    A piece is entered after it was sent. After a kill a piece may therefore be sent a second time, but is never left
    out; every backend makes a repeated send harmless. Only one process at a time holds the journal.

    Raises:
        BusyError: Another process holds the journal.
        OSError: The folder cannot be written.
    """

    def __init__(self, folder: Path, backend: str, destination: str):
        folder.mkdir(parents=True, exist_ok=True)
        self.path = path_of(folder, backend, destination)
        self.destination = destination
        self.remote: dict[str, str] = {}
        """Names that the destination gave the run, such as run_id."""
        self._sent: dict[str, str] = {}
        self._marks: set[str] = set()
        """Keys of entries that do not count as pieces of the run."""
        self._refused: dict[str, str] = {}
        """Reason of each refusal, by key."""
        self.arrived_at = 0.0
        """Time of the last arrival, by time.monotonic()."""
        self._file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._file)
            raise BusyError(self.path) from error
        self._read()

    def has(self, item: Item) -> bool:
        """Whether the piece has arrived or was refused with its present content."""
        return self._sent.get(item.key) == item.digest

    def add(self, items: Iterable[Item]) -> None:
        """Enter pieces that have arrived, in one write."""
        self.arrived_at = monotonic()
        self._append([{"sent" if item.is_counted else "mark": item.key, "digest": item.digest} for item in items])

    def refuse(self, item: Item, why: str) -> None:
        """Enter a piece that the destination will never accept with its present content."""
        self._append([{"sent": item.key, "digest": item.digest, "refused": why}])

    def remember(self, **names: str) -> None:
        """Store names that the destination gave the run."""
        self._append([{"remote": names}])

    def forget(self, is_lost: Callable[[str], bool]) -> None:
        """Remove the keys of pieces that the destination does not have, as `is_lost` decides."""
        self._append([{"lost": key} for key in self._sent if is_lost(key)])

    @property
    def sent(self) -> int:
        """Number of pieces that have arrived."""
        return len(self._sent.keys() - self._marks) - len(self._refused)

    @property
    def refused(self) -> dict[str, str]:
        return dict(self._refused)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _read(self) -> None:
        data = self.path.read_bytes()
        end = data.rfind(b"\n") + 1
        if end < len(data):  # a kill left a half-written line
            os.ftruncate(self._file, end)
        for line in data[:end].splitlines():
            try:
                self._enter(json.loads(line))
            except (ValueError, TypeError, AttributeError, KeyError):
                continue  # a piece without a readable receipt is sent once more
        if not end:
            self._append([{"destination": self.destination}])

    def _append(self, lines: list[dict[str, Any]]) -> None:
        if lines:
            text = "".join(to_strict_json(line) + "\n" for line in lines)
            os.write(self._file, text.encode("utf-8", "backslashreplace"))
        for line in lines:
            self._enter(line)

    def _enter(self, line: dict[str, Any]) -> None:
        self.remote |= line.get("remote", {})
        key = line.get("sent") or line.get("mark") or line.get("lost")
        if key is None:
            return
        self._refused.pop(key, None)
        self._sent.pop(key, None)
        if "lost" in line:
            return
        self._sent[key] = line["digest"]
        if "mark" in line:
            self._marks.add(key)
        if "refused" in line:
            self._refused[key] = line["refused"]


def folder_of(run: RunDir) -> Path:
    """Return the folder of the receipts of a run."""
    return run.path / "trackers"


def path_of(folder: Path, backend: str, destination: str) -> Path:
    """Return the path of the journal of one destination."""
    return folder / f"{backend}-{digest(destination)[:8]}.jsonl"


def read_remote(folder: Path, backend: str, destination: str) -> dict[str, str]:
    """Return the names that a destination gave the run. Another process may be sending to it."""
    names: dict[str, str] = {}
    with suppress(OSError):
        for line in path_of(folder, backend, destination).read_bytes().split(b"\n"):
            with suppress(ValueError, AttributeError, TypeError):  # a kill may have left a half-written line
                names |= json.loads(line).get("remote", {})
    return names


def run_card(folder: Path, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return `run.json` of the folder of receipts, the identity of the run for every tracker. `make` creates it if it
    does not exist."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "run.json"
    lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            card = make()
            replace_text(path, to_strict_json(card, indent=2) + "\n")
            return card
    finally:
        os.close(lock)
