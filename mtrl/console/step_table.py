"""The table of training steps: the columns of a step, and their fit to the width of the terminal."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rich.text import Text

from mtrl.utils.text import MISSING, decimal, duration, one_line, percent, scientific, short, whole


@dataclass(frozen=True)
class Column:
    """One metric of the table, right-aligned."""

    title: str
    key: str
    width: int
    show: Callable[[float], str]
    style: str = ""

    def cell(self, metrics: Mapping[str, Any]) -> Text:
        """Return the metric in exactly `width` characters, in red if it is not a finite number."""
        value = metrics.get(self.key)
        if value is None:
            return Text(MISSING.rjust(self.width), style="dim")
        if isinstance(value, str):
            return Text(one_line(value)[: self.width - 1].rjust(self.width))
        number = float(value)
        if not math.isfinite(number):
            return Text(str(number).rjust(self.width), style="bold red")
        text = self.show(number)
        fitting = (each for each in (text, text.replace(",", "")) if len(each) < self.width)
        return Text(next(fitting, f"{number:.0e}").rjust(self.width), style=self.style)


COLUMNS = (
    Column("step", "step", 7, whole, "bold"),
    Column("reward", "rollout/reward/mean", 9, decimal, "cyan"),
    Column("success", "rollout/success/mean", 9, percent, "green"),
    Column("pass@1", "val/success/pass_k_1", 9, percent, "bold green"),
    Column("zero-adv", "analysis/zero_adv_groups", 10, short, "yellow"),
    Column("turns", "rollout/turns/mean", 8, decimal),
    Column("tok/s", "perf/tokens_per_second", 9, whole),
    Column("drift", "analysis/logprob_drift/max", 10, scientific, "dim"),
    Column("time", "time/step", 8, duration),
    # The following columns are shown if the terminal is wide enough.
    Column("loss", "train/loss", 10, decimal, "dim"),
    Column("entropy", "train/entropy", 9, decimal, "dim"),
    Column("grad", "train/grad_norm", 8, short, "dim"),
    Column("clip", "train/clip_frac", 8, percent, "dim"),
    Column("longest", "rollout/tokens/response_max", 9, whole, "dim"),
    Column("lr", "train/lr", 9, scientific, "dim"),
)
"""Columns in order of importance: a narrow terminal shows the first ones."""


REPEAT = 20
"""Number of lines after which the titles are shown again."""


class StepTable:
    """Aligned lines, one per step; the titles are repeated every `REPEAT` lines."""

    def __init__(self) -> None:
        self._rows = 0
        self._columns: list[Column] = []

    def lines(self, metrics: Mapping[str, Any], width: int) -> list[Text]:
        """Return the line of one step. The titles precede it if they are due or if the columns have changed."""
        columns = _fitting(width)
        titled = self._rows % REPEAT == 0 or columns != self._columns
        self._rows = 1 if titled else self._rows + 1
        self._columns = columns
        row = Text.assemble(*(column.cell(metrics) for column in columns))
        return [Text("".join(column.title.rjust(column.width) for column in columns), style="bold dim"), row][
            not titled :
        ]

    def restart(self) -> None:
        """Show the titles again before the next step, because something else was printed."""
        self._rows = 0


def _fitting(width: int) -> list[Column]:
    columns, used = [], 0
    for column in COLUMNS:
        used += column.width
        if used > width:
            break
        columns.append(column)
    return columns
