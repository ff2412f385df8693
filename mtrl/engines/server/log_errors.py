"""The line of a server's log that best explains why the server ended."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import takewhile

from mtrl.utils.text import one_line

MAX_CHARACTERS = 400
"""Maximum length of the line, in characters."""
MAX_LINES = 400
"""Number of lines at the end of a log that are searched; the tracebacks of an engine's processes are long."""
MAX_INDENTED = 2
"""Maximum number of indented lines below the found line that are included (as in pydantic's messages)."""

COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
PREFIX = re.compile(
    r"^(?:\([\w-]+ pid=\d+\)\s*"  # (EngineCore pid=12)
    r"|(?:INFO|WARNING|ERROR|CRITICAL):?\s+(?:[\d:.-]+ )*(?:\[[\w./-]+:\d+\]\s?)?"  # ERROR 08-23 12:00:00 [a.py:1]
    r"|\[\d{4}-\d\d-\d\d[^\]]*\]\s*"  # [2026-08-23 12:00:00 TP0]
    r")+"
)
"""Prefixes that loggers of engines put before a line."""
KNOWN_CAUSE = re.compile(
    r"out of memory|cannot allocate memory|no space left on device|address already in use|less than desired"
    r"|unrecognized arguments|ambiguous option|cannot start ",
    re.IGNORECASE,
)
"""Words of known causes. Lines with them explain an error better than the exceptions that follow from it."""
PORT_TAKEN = re.compile(r"address already in use|address in use|EADDRINUSE", re.IGNORECASE)
EXCEPTION = re.compile(r"^(?:[\w.]+\.)?_?[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Fault)\b(?::|$)|^[\w./ -]+: error: ")
"""Pattern of the last line of a traceback, or of argparse's error line."""
CONSEQUENCE = re.compile(
    r"root cause|engine core initialization failed|engine core proc|scheduler (?:or detokenizer )?(?:.*)(?:died|dead)"
    r"|^(?:BrokenPipe|EOF|ConnectionReset|ChildProcess)Error|^(?:asyncio\.exceptions\.)?CancelledError"
    r"|^KeyboardInterrupt|^SystemExit|during handling of the above|leaked (?:semaphore|shared_memory)",
    re.IGNORECASE,
)
"""Pattern of lines about exceptions that are consequences of others."""


def error_line(log: str) -> str:
    """Return one clean line of a log that best explains an error; empty where the log is empty.

    A line with a known cause has the highest priority, then an exception that is not a consequence of another, then any
    exception, then any line. The last line of the highest priority is returned, with the indented lines below it.
    """
    lines = [line for line in map(_bare, log.splitlines()) if line][-MAX_LINES:]
    kinds: tuple[Callable[[str], object], ...] = (
        lambda line: KNOWN_CAUSE.search(line) and not CONSEQUENCE.search(line),
        lambda line: EXCEPTION.search(line) and not CONSEQUENCE.search(line),
        EXCEPTION.search,
        bool,
    )
    for matches in kinds:
        if found := [number for number, line in enumerate(lines) if matches(line)]:
            below = takewhile(lambda line: line[0] == " ", lines[found[-1] + 1 : found[-1] + 1 + MAX_INDENTED])
            return one_line(" ".join(" ".join([lines[found[-1]], *below]).split()), MAX_CHARACTERS)
    return ""


def is_port_taken(log: str) -> bool:
    return bool(PORT_TAKEN.search(log))


def _bare(line: str) -> str:
    """Remove colours and the prefix of a logger from a line."""
    return PREFIX.sub("", COLOUR.sub("", line)).rstrip()
