"""Text search in the messages of trajectories. Each request searches only a part, so that no request takes long."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import IO, Any

from mtrl.record.index import IndexRow, StoredFile
from mtrl.types import Trajectory
from mtrl.view.detail import UnreadableLine, message, parse
from mtrl.view.query import QueryRefusal

SECONDS = 0.5
"""Maximum seconds of search per request."""
MOST_HITS = 3
"""Maximum number of hits shown per trajectory."""
MOST_COUNTED = 1000
AROUND = 60
"""Number of characters shown on each side of a hit."""
LONGEST_QUERY = 1000

_PLAIN = re.compile(r"[ !#-\[\]-~]+")
"""Text that JSON writes without escapes: printable ASCII without quotes and backslashes."""


@dataclass
class SearchResult:
    """Result of one search request."""

    rows: list[tuple[IndexRow, list[dict[str, Any]], int]] = field(default_factory=list)
    """Found rows, each with its first hits and its number of hits."""
    searched: int = 0
    """Number of rows searched so far, including earlier requests."""
    missed: int = 0
    """Number of rows that were added meanwhile at positions already passed; only a new search finds them."""
    cursor: str | None = None
    """Cursor of the next request; None: all rows were searched."""


class Needle:
    """The text to search for. Case is ignored; for ASCII text, only the case of ASCII letters."""

    def __init__(self, text: str):
        if not text.strip() or len(text) > LONGEST_QUERY:
            raise QueryRefusal(400, f"q must be text of 1 to {LONGEST_QUERY} characters")
        flags = re.IGNORECASE | re.ASCII if text.isascii() else re.IGNORECASE
        self._pattern = re.compile(re.escape(text), flags)
        self._bytes = text.lower().encode() if _PLAIN.fullmatch(text) else None

    def may_be_in(self, line: bytes) -> bool:
        """Return False only if no message of the line has the text. Parsing the JSON takes ten times as long as this
        check."""
        return self._bytes is None or self._bytes in line.lower() or b"\\u00" in line

    def hits(self, trajectory: Trajectory) -> Iterator[dict[str, Any]]:
        for turn, role, text in texts_of(trajectory):
            for match in self._pattern.finditer(text):
                yield {
                    "turn": turn,
                    "role": role,
                    "before": text[max(0, match.start() - AROUND) : match.start()],
                    "match": match[0],
                    "after": text[match.end() : match.end() + AROUND],
                }


def texts_of(trajectory: Trajectory) -> Iterator[tuple[int, str, str]]:
    """Yield (turn, role, text) of every message. Turns count from 1; turn 0 is the final observation."""
    for number, turn in enumerate(trajectory.turns, 1):
        for each in [*turn.observation, turn.message]:
            yield from _texts(number, each)
    for each in trajectory.final_observation:
        yield from _texts(0, each)


def _texts(number: int, data: Any) -> Iterator[tuple[int, str, str]]:
    shown = message(data)
    calls = (f"{call['name']} {call['arguments']}" for call in shown["tool_calls"])
    for text in (shown["reasoning"], shown["content"], *calls):
        if text:
            yield number, shown["role"], text


def search(
    rows: Sequence[IndexRow],
    needle: Needle,
    cursor: str | None,
    most: int,
    clock: Callable[[], float] = time.monotonic,
) -> SearchResult:
    """Search from the cursor until `most` trajectories are found or `SECONDS` are over.

    Raises:
        Refusal: The cursor belongs to another search, or its trajectory no longer exists.
    """
    found = SearchResult()
    start, found.searched = resume(rows, cursor) if cursor else (0, 0)
    found.missed = max(0, start - found.searched)
    end = clock() + SECONDS
    with ExitStack() as stack:
        files: dict[StoredFile, IO[bytes] | None] = {}
        for place, row in enumerate(rows[start:], start):
            hits = _look(row, needle, files, stack)
            found.searched += 1
            if hits:
                found.rows.append((row, hits[:MOST_HITS], len(hits)))
            if (len(found.rows) == most or clock() > end) and place + 1 < len(rows):
                found.cursor = f"{row.file.name}/{row.number}/{place}/{found.searched}"
                break
    return found


def resume(rows: Sequence[IndexRow], cursor: str) -> tuple[int, int]:
    """Return the position from which to continue, and the number of rows already searched. The list changes while a run
    goes on, so the cursor names the last searched trajectory: FILE/LINE/PLACE/SEARCHED."""
    name, *numbers = cursor.rsplit("/", 3)
    if len(numbers) == 3 and all(n.isdecimal() and len(n) < 18 for n in numbers):
        line, guess, searched = map(int, numbers)
        for place in (*range(guess, min(guess + 1, len(rows))), *range(len(rows))):
            if rows[place].number == line and rows[place].file.name == name:
                return place + 1, searched
    raise QueryRefusal(400, "cursor is of another search, or its trajectory no longer exists; search again")


def _look(
    row: IndexRow, needle: Needle, files: dict[StoredFile, IO[bytes] | None], stack: ExitStack
) -> list[dict[str, Any]]:
    """Return the hits in one line; an unreadable line has none."""
    if row.line.problem is not None:
        return []
    if row.file not in files:
        stack.pop_all().close()
        files.clear()
        try:
            files[row.file] = stack.enter_context(row.file.path.open("rb"))
        except OSError:
            files[row.file] = None
    file = files[row.file]
    if file is None:
        return []
    file.seek(row.line.offset)
    line = file.read(row.line.length)
    if not needle.may_be_in(line):
        return []
    try:
        hits = needle.hits(parse(line))
        return [hit for hit, _ in zip(hits, range(MOST_COUNTED), strict=False)]
    except UnreadableLine:
        return []
