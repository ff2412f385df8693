"""Progress bars in a terminal; without a terminal, an occasional line that reports the progress."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich import progress as bars
from rich.console import Console as RichConsole

from mtrl.utils.text import duration

SILENCE = 20.0
"""Seconds without output after which long work prints its progress, if there is no terminal."""


class Work:
    """One long piece of work in progress."""

    def __init__(
        self,
        description: str,
        total: int | None,
        advanced: Callable[[Work, int], None],
        described: Callable[[str], None] = lambda text: None,
        extended: Callable[[int], None] = lambda total: None,
    ):
        self.description = description
        self.total = total
        self.done = 0
        self._start = time.monotonic()
        self._advanced, self._described, self._extended = advanced, described, extended

    def describe(self, description: str) -> None:
        """Show another description from now on."""
        if description != self.description:
            self.description = description
            self._described(description)

    def advance(self, count: int = 1) -> None:
        """Count `count` more units as done. The total grows if it turns out to be too small."""
        self.done += count
        if self.total is not None and self.done > self.total:
            self.total = self.done
            self._extended(self.total)
        self._advanced(self, count)

    def __str__(self) -> str:
        of = f"/{self.total}" if self.total else ""
        return f"{self.description}: {self.done}{of} after {duration(time.monotonic() - self._start)}"


class ProgressBars:
    """Shows each `Work` inside `track`. Nested ones are a stack of bars; each bar vanishes when its work is done."""

    def __init__(self, console: RichConsole, print_line: Callable[[str], None]):
        self._console = console
        self._live = console.is_terminal and not console.is_dumb_terminal and console.file.isatty()
        self._print = print_line
        self._bars: bars.Progress | None = None
        self._last_line = time.monotonic()

    def record_output(self) -> None:
        """Record that a line was printed, which delays the next progress line."""
        self._last_line = time.monotonic()

    def refresh(self) -> None:
        """Draw the bars now, if there are any."""
        if self._bars is not None:
            self._bars.refresh()

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Remove the bars, and draw them again at the end. Lines are printed in between, because Rich draws the bars in
        a thread, also while a line is on its way: the line would remove too few or too many lines above it."""
        bars = self._bars
        if bars is None:
            yield
            return
        bars.stop()
        try:
            yield
        finally:
            bars.start()

    @contextmanager
    def track(self, description: str, total: int | None) -> Iterator[Work]:
        if not self._live:
            yield Work(description, total, self._print_progress)
            return
        outermost = self._bars is None
        if self._bars is None:
            self._bars = self._new_bars()
            self._bars.start()
        shown = self._bars
        task = shown.add_task(description, total=total)
        try:
            yield Work(
                description,
                total,
                lambda _, count: shown.advance(task, count),
                lambda text: shown.update(task, description=text),
                lambda total: shown.update(task, total=total),
            )
        finally:
            shown.remove_task(task)
            if outermost:
                shown.stop()
                self._bars = None

    def _print_progress(self, work: Work, _: int) -> None:
        if time.monotonic() - self._last_line > SILENCE:
            self._print(str(work))

    def _new_bars(self) -> bars.Progress:
        return bars.Progress(
            bars.TextColumn("{task.description}", style="bold", markup=False),
            bars.BarColumn(bar_width=None, complete_style="cyan", finished_style="green"),
            bars.MofNCompleteColumn(),
            bars.TimeElapsedColumn(),
            bars.TextColumn("left", style="dim"),
            bars.TimeRemainingColumn(compact=True),
            console=self._console,
            transient=True,
            expand=True,
            refresh_per_second=5,
        )
