"""The checklist as a table for the terminal."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from typing import TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mtrl.preflight.result import CheckResult, Status, worst
from mtrl.utils.text import duration, one_line

STYLES = {Status.PASS: "green", Status.WARN: "yellow", Status.FAIL: "bold red", Status.SKIP: "dim"}
NAME = 16
"""Default width of the name column, in characters: the length of the longest name of a check."""
CHARACTERS = 400
"""Maximum number of characters of the evidence to show; the JSON holds all of it."""


def console(file: TextIO | None = None, width: int | None = None) -> Console:
    return Console(file=file or sys.stdout, width=width, highlight=False, markup=False, emoji=False)


def table(results: Sequence[CheckResult], name_width: int = NAME) -> Table:
    """Return a table with one row per check: status, name, evidence, and the fix below the evidence. Tables of one row
    align too, because the columns have fixed widths."""
    shown = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=False, expand=True)
    shown.add_column(width=4, no_wrap=True)
    shown.add_column(width=name_width, no_wrap=True)
    shown.add_column(overflow="fold", ratio=1)
    shown.add_column(width=5, justify="right", no_wrap=True, style="dim")
    for result in results:
        found = Text(one_line(result.evidence, CHARACTERS), style="dim" if result.status == Status.SKIP else "")
        if result.fix:
            found.append(f"\n→ {one_line(result.fix, CHARACTERS)}", style="cyan")
        cells = (
            Text(result.status, style=STYLES[result.status]),
            Text(result.name),
            found,
            Text(duration(result.seconds)),
        )
        shown.add_row(*cells)
    return shown


def verdict(results: Sequence[CheckResult]) -> Text:
    """Return the last line: the number of checks per status, and whether to train."""
    counts = Counter(result.status for result in results)
    line = ", ".join(f"{counts[status]} {word}" for status, word in _WORDS.items() if counts[status])
    status = worst(results)
    advice = {
        Status.FAIL: "do not train yet: fix what failed first",
        Status.WARN: "nothing failed; read the warnings",
        Status.PASS: "ready to train",
    }[status]
    return Text(f"{line}: {advice}", style=STYLES[status])


_WORDS = {Status.PASS: "passed", Status.WARN: "to look at", Status.FAIL: "failed", Status.SKIP: "skipped"}
