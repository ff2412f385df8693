"""What has arrived: a journal of one line per piece, which survives being killed at any instant."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any

from mtrl.tracking.files import replace_text, to_strict_json
from mtrl.tracking.followers.items import Item, digest
from mtrl.tracking.run_dir import RunDir


class BusyError(Exception):
    """Another process is sending this run to this destination."""


class Receipts:
    """Which pieces of a run a destination has, and the names that it gave the run.

    A piece is entered after it was sent. So after a kill something may be sent a second time, never left out: every
    backend makes that harmless. One process at a time holds the journal.

    Raises:
        BusyError: another one does.
        OSError: the folder cannot be written.
    """

    def __init__(self, folder: Path, backend: str, destination: str):
        folder.mkdir(parents=True, exist_ok=True)
        self.path = path_of(folder, backend, destination)
        self.destination = destination
        self.remote: dict[str, str] = {}
        """Names that the destination gave, such as run_id."""
        self._sent: dict[str, str] = {}
        self._marks: set[str] = set()
        """Keys that are no pieces of the run."""
        self._refused: dict[str, str] = {}
        """Key -> why it was not taken."""
        self.arrived_at = 0.0
        """When something arrived last, by time.monotonic()."""
        self._file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._file)
            raise BusyError(self.path) from error
        self._read()

    def has(self, item: Item) -> bool:
        """Whether it is there, or was refused, with the content that it has now."""
        return self._sent.get(item.key) == item.digest

    def add(self, items: Iterable[Item]) -> None:
        """Enter what has arrived, in one write."""
        self.arrived_at = monotonic()
        self._append([{"sent" if item.is_counted else "mark": item.key, "digest": item.digest} for item in items])

    def refuse(self, item: Item, why: str) -> None:
        """Enter what will never be taken as it is."""
        self._append([{"sent": item.key, "digest": item.digest, "refused": why}])

    def remember(self, **names: str) -> None:
        """Keep names that the destination gave."""
        self._append([{"remote": names}])

    def forget(self, is_lost: Callable[[str], bool]) -> None:
        """Strike out the keys that the destination does not have after all."""
        self._append([{"lost": key} for key in self._sent if is_lost(key)])

    @property
    def sent(self) -> int:
        """How many pieces have arrived."""
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
        if end < len(data):  # a line that a kill left half-written
            os.ftruncate(self._file, end)
        for line in data[:end].splitlines():
            try:
                self._enter(json.loads(line))
            except (ValueError, TypeError, AttributeError, KeyError):
                continue  # then it is sent once more
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
    """Where the trackers of a run keep what they know."""
    return run.path / "trackers"


def path_of(folder: Path, backend: str, destination: str) -> Path:
    """The journal of one destination."""
    return folder / f"{backend}-{digest(destination)[:8]}.jsonl"


def read_remote(folder: Path, backend: str, destination: str) -> dict[str, str]:
    """The names that a destination gave, also while another process sends to it."""
    names: dict[str, str] = {}
    with suppress(OSError, ValueError, AttributeError):
        for line in path_of(folder, backend, destination).read_text(encoding="utf-8").splitlines():
            names |= json.loads(line).get("remote", {})
    return names


def run_card(folder: Path, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """`run.json` of the folder of receipts, made by `make` where there is none: who the run is, for every tracker."""
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
