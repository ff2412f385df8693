"""What a server says last: the line of its log that tells best why it died."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import takewhile

from mtrl.tracking.text import one_line

SHOWN = 400
"""Characters of them."""
LATELY = 400
"""Lines at the end of a log that are looked at; the tracebacks of an engine's processes are long."""
BELOW = 2
"""Lines of a message that goes on below (pydantic's)."""

COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
PREFIX = re.compile(
    r"^(?:\([\w-]+ pid=\d+\)\s*"  # (EngineCore pid=12)
    r"|(?:INFO|WARNING|ERROR|CRITICAL):?\s+(?:[\d:.-]+ )*(?:\[[\w./-]+:\d+\]\s?)?"  # ERROR 08-23 12:00:00 [a.py:1]
    r"|\[\d{4}-\d\d-\d\d[^\]]*\]\s*"  # [2026-08-23 12:00:00 TP0]
    r")+"
)
"""What loggers of engines put before a line."""
TELLING = re.compile(
    r"out of memory|cannot allocate memory|no space left on device|address already in use|less than desired"
    r"|unrecognized arguments|ambiguous option|cannot start ",
    re.IGNORECASE,
)
"""Words of causes that are told by other lines than that of an exception, or before others that follow from them."""
PORT_TAKEN = re.compile(r"address already in use|address in use|EADDRINUSE", re.IGNORECASE)
EXCEPTION = re.compile(r"^(?:[\w.]+\.)?_?[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Fault)\b(?::|$)|^[\w./ -]+: error: ")
"""The last line of a traceback, or argparse's."""
CONSEQUENCE = re.compile(
    r"root cause|engine core initialization failed|engine core proc|scheduler (?:or detokenizer )?(?:.*)(?:died|dead)"
    r"|^(?:BrokenPipe|EOF|ConnectionReset|ChildProcess)Error|^(?:asyncio\.exceptions\.)?CancelledError"
    r"|^KeyboardInterrupt|^SystemExit|during handling of the above|leaked (?:semaphore|shared_memory)",
    re.IGNORECASE,
)
"""Exceptions that follow from others."""


def last_words(log: str) -> str:
    """One clean line; empty where the log is.

    What names a cause that is known comes first, then the last exception that does not follow from another, then the
    last exception, then the last line. Of several such lines the last one counts, with what is indented below it.
    """
    lines = [line for line in map(_bare, log.splitlines()) if line][-LATELY:]
    kinds: tuple[Callable[[str], object], ...] = (
        lambda line: TELLING.search(line) and not CONSEQUENCE.search(line),
        lambda line: EXCEPTION.search(line) and not CONSEQUENCE.search(line),
        EXCEPTION.search,
        bool,
    )
    for is_it in kinds:
        if found := [number for number, line in enumerate(lines) if is_it(line)]:
            below = takewhile(lambda line: line[0] == " ", lines[found[-1] + 1 : found[-1] + 1 + BELOW])
            return one_line(" ".join(" ".join([lines[found[-1]], *below]).split()), SHOWN)
    return ""


def is_port_taken(log: str) -> bool:
    return bool(PORT_TAKEN.search(log))


def _bare(line: str) -> str:
    """Without colours and what a logger puts before it."""
    return PREFIX.sub("", COLOUR.sub("", line)).rstrip()
