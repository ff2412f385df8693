"""Console output of a run, while it goes on and when it ends."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, suppress
from typing import Any, TextIO

from rich.console import Console as RichConsole
from rich.console import Group, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from mtrl.console.episode_view import Decode, EpisodeView
from mtrl.console.headline import headline
from mtrl.console.progress import ProgressBars, Work
from mtrl.console.step_table import StepTable
from mtrl.types import Trajectory
from mtrl.utils.text import MISSING, decimal, duration, one_line, percent

Mirror = Callable[[str, int], None]

OUTCOME = (
    ("success", "success", percent),
    ("success, sampled", "success_sampled", percent),
    ("reward", "reward", decimal),
)


class _Terminal(RichConsole):
    """Rich console that survives the loss of its terminal: a closed pipe or a lost session must not end a run."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


class Console:
    """Prints the lines of a run: with colours and bars in a terminal, as plain text elsewhere and in the `mirror`."""

    name = "console"

    def __init__(self, file: TextIO | None = None, width: int | None = None, mirror: Mirror | None = None):
        file = file or sys.stdout
        if isinstance(file, io.TextIOWrapper):
            file.reconfigure(errors="replace")  # a terminal that cannot show a character must not end a run
        self._rich = _Terminal(file=file, width=width, highlight=False, markup=False, emoji=False)
        self._mirror = mirror
        self._table = StepTable()
        self._pass_1: float | None = None
        self._progress = ProgressBars(self._rich, self.note)

    # -- during the run ----------------------------------------------------------------------------------------------

    def banner(self, facts: Mapping[str, Any], title: str = "mtrl") -> None:
        """Print a title and aligned facts about the run that is about to start."""
        self._print(Rule(Text(one_line(title), style="bold"), align="left", style="cyan"), _facts(facts), Text())

    def progress(self, description: str, total: int | None = None) -> AbstractContextManager[Work]:
        """Show a bar for long work: `with console.progress("warm start", 300) as bar: … bar.advance()`. Bars may be
        nested."""
        return self._progress.track(one_line(description, 40), total)

    def refresh(self) -> None:
        """Draw the bars now, instead of at their next interval."""
        self._progress.refresh()

    def step(self, metrics: Mapping[str, Any]) -> None:
        """Print one line for one training step; pass@1 comes from the last evaluation."""
        self._remember(metrics)
        self._print(*self._table.lines({"val/success/pass_k_1": self._pass_1, **metrics}, self._rich.width))

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Print a line if the step trained. The tracker calls this; `evaluation` prints the evaluations."""
        self._remember(metrics)
        if any(key.startswith(("rollout/", "train/")) for key in metrics):
            self.step({"step": step, **metrics})

    def evaluation(
        self,
        metrics: Mapping[str, Any],
        best: Trajectory | None = None,
        worst: Trajectory | None = None,
        decode: Decode | None = None,
    ) -> None:
        """Print the headline of an evaluation, and one trajectory from each end of the reward range.

        If `decode` is given, the text of a turn is decoded from its sampled tokens, closing token included.
        """
        self._remember(metrics)
        shown: list[RenderableType] = [headline(metrics)]
        if best:
            shown.append(EpisodeView("best", best, decode))
        if worst and worst is not best:
            shown.append(EpisodeView("worst", worst, decode))
        self._print(*shown)
        self._table.restart()

    def show(self, part: RenderableType) -> None:
        """Print anything that rich can render, such as a table."""
        self._print(part)

    def note(self, text: str) -> None:
        """Print one line in a dim style."""
        self._print(Text(one_line(text, 1000), style="dim"), soft_wrap=True)

    def warning(self, text: str) -> None:
        """Print one line as a warning and mirror it at the level WARNING."""
        self._print(_warning(text), soft_wrap=True, level=logging.WARNING)

    def show_warning(self, text: str) -> None:
        """Print a warning without mirroring it, because run.log has it already (`RunLog.show_warnings`)."""
        self._print(_warning(text), soft_wrap=True, level=None)

    def close(self) -> None:
        """Do nothing. The tracker calls `close` of every backend."""

    # -- end of the run ----------------------------------------------------------------------------------------------

    def finish(self, summary: Mapping[str, Any], paths: Mapping[str, Any], hints: Mapping[str, str]) -> None:
        """Print the last lines: the outcome, the paths (`name: path`) and the hints (`purpose: command`)."""
        done = f"{summary.get('steps') or 0} steps in {duration(summary.get('seconds') or 0.0)}"
        self._print(Text(), Rule(Text(done, style="bold"), align="left", style="green"), _outcome(summary))
        # These lines are never wrapped, so that paths and commands can be copied.
        lines = [Text(), *_facts_lines(paths)]
        for purpose, command in hints.items():
            lines += [
                Text(),
                Text(f"{one_line(purpose)}:", style="dim"),
                Text(f"  {one_line(command, 2000)}", style="bold cyan"),
            ]
        self._print(*lines, soft_wrap=True)

    # -- output ------------------------------------------------------------------------------------------------------

    def _remember(self, metrics: Mapping[str, Any]) -> None:
        self._pass_1 = metrics.get("val/success/pass_k_1", self._pass_1)

    def _print(self, *parts: RenderableType, soft_wrap: bool = False, level: int | None = logging.INFO) -> None:
        plain = self._plain(parts, soft_wrap)
        self._progress.record_output()
        with suppress(OSError, ValueError):  # the terminal may be lost or closed; the mirror still gets the lines
            if self._rich.is_terminal:
                with self._progress.hidden():
                    self._rich.print(Group(*parts), soft_wrap=soft_wrap)
            else:
                self._rich.file.write(plain)
                self._rich.file.flush()
        if self._mirror and level is not None:
            for line in filter(None, plain.split("\n")):
                self._mirror(line, level)

    def _plain(self, parts: Iterable[RenderableType], soft_wrap: bool) -> str:
        """Return `parts` as text without colour and without trailing spaces."""
        page = io.StringIO()
        paper = RichConsole(
            file=page, width=self._rich.width, color_system=None, force_terminal=False,
            highlight=False, markup=False, emoji=False,
        )  # fmt: skip
        paper.print(Group(*parts), soft_wrap=soft_wrap)
        return "".join(line.rstrip() + "\n" for line in page.getvalue().splitlines())


def _warning(text: str) -> Text:
    return Text(f"warning: {one_line(text, 2000)}", style="yellow")


def _facts_lines(facts: Mapping[str, Any]) -> list[Text]:
    names = [one_line(name) for name in facts]
    width = max(map(len, names), default=0) + 2
    values = (one_line(value, 2000) for value in facts.values())
    return [Text.assemble((name.ljust(width), "dim"), value) for name, value in zip(names, values, strict=True)]


def _facts(facts: Mapping[str, Any]) -> Table:
    grid = Table.grid(padding=(0, 2))
    for name, value in facts.items():
        grid.add_row(Text(one_line(name), style="dim"), Text(one_line(value, 2000)))
    return grid


def _outcome(summary: Mapping[str, Any]) -> Table:
    """Table of the held-out results, before and after training side by side."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    table.add_column("held out")
    for moment in ("before", "after"):
        table.add_column(moment, justify="right")
    for label, key, show in OUTCOME:
        before, after = summary.get(f"{key}_before"), summary.get(f"{key}_after")
        if before is not None or after is not None:
            cells = [MISSING if value is None else show(value) for value in (before, after)]
            table.add_row(Text(label), Text(cells[0]), Text(cells[1], style="bold green"))
    return table
