"""Checks that all runs of `trl.py` did the same work, and computes their ratios and their table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median, stdev
from typing import Any

from mtrl.errors import UserError

COUNTED = ("episodes", "prompts", "tools", "sampled", "trained")
"""Counts that must be equal on both sides."""
MEASURES = ("step", "generate", "forward", "backward", "training", "peak RSS, MiB")
RATE = "sampled tokens/s"


@dataclass
class Run:
    """One process in one round."""

    side: str
    """mtrl or TRL."""
    name: str
    threads: int
    round: int
    result: dict[str, Any]
    """JSON that `step.py` or `trl_step.py` writes."""

    @property
    def clock(self) -> str:
        """CPU seconds on one thread. On several threads wall seconds, since threads use CPU time while they wait."""
        return "cpu_s" if self.threads == 1 else "wall_s"

    @property
    def figures(self) -> dict[str, float]:
        """Figures of the fastest step."""
        best = min(self.result["steps"], key=lambda step: step["step"][self.clock])
        parts = {name: cost[self.clock] for name, cost in best["parts"].items()}
        step = best["step"][self.clock]
        return {
            "step": step,
            **{name: parts[name] for name in ("generate", "forward", "backward")},
            "training": step - parts["generate"],
            "peak RSS, MiB": self.result["peak_rss_mib"],
            RATE: best["tokens"]["sampled"] / parts["generate"],
        }


def check(runs: Sequence[Run]) -> None:
    """
    Raises:
        UserError: two steps differ in a count.
    """
    counts = [(run.name, {key: step["tokens"][key] for key in COUNTED}) for run in runs for step in run.result["steps"]]
    for name, count in counts:
        first, expected = counts[0]
        for key in COUNTED:
            if count[key] != expected[key]:
                raise UserError(
                    f"not the same work: the number of {key} is {count[key]:,} in a step of {name} and "
                    f"{expected[key]:,} in a step of {first}; give both sides the same sizes (--sizes)"
                )


def ratios(runs: Sequence[Run]) -> dict[str, dict[str, list[float]]]:
    """Return the ratio of each run of mtrl to the least value of TRL in the same round, `{name: {measure: [one per
    round]}}`. All runs have the same number of threads."""
    found: dict[str, dict[str, list[float]]] = {}
    for run in (run for run in runs if run.side == "mtrl"):
        others = [other.figures for other in runs if other.side == "TRL" and other.round == run.round]
        mine = found.setdefault(run.name, {measure: [] for measure in MEASURES})
        for measure in MEASURES if others else ():
            mine[measure].append(run.figures[measure] / min(other[measure] for other in others))
    return found


def table(runs: Sequence[Run]) -> str:
    """Return a Markdown table for each number of threads, with the medians of the rounds, their minima and maxima."""
    return "\n\n".join(
        _table([run for run in runs if run.threads == threads], threads)
        for threads in sorted({run.threads for run in runs})
    )


def _table(runs: Sequence[Run], threads: int) -> str:
    columns = (*MEASURES, RATE)
    unit = "1 thread, CPU s" if threads == 1 else f"{threads} threads, wall s"
    lines = [f"| {' | '.join([unit, *columns])} |", "|" + "---|" * (1 + len(columns))]
    for name in dict.fromkeys(run.name for run in runs):
        figures = [run.figures for run in runs if run.name == name]
        lines.append(_row(name, [[of[column] for of in figures] for column in columns]))
    for name, of in ratios(runs).items():
        lines.append(_row(f"{name} / TRL's best", [of.get(column, []) for column in columns]))
    return "\n".join(lines)


def _row(name: str, values: Sequence[Sequence[float]]) -> str:
    return f"| {' | '.join([name, *map(cell, values)])} |"


def cell(values: Sequence[float]) -> str:
    """Return the median, and the minimum and maximum in brackets, with three digits or more."""
    if not values:
        return ""
    digits = min(3, max(0, 2 - math.floor(math.log10(max(median(values), 1e-3)))))
    middle, least, most = (f"{value:,.{digits}f}" for value in (median(values), min(values), max(values)))
    return middle if len(values) == 1 else f"{middle} ({least}-{most})"


def lesson_table(found: dict[str, Any]) -> str:
    """Return Markdown with the numbers of steps of both sides for each seed."""
    lesson, steps, ahead = found["lesson"], found["steps"], found["ahead"]
    seeds = range(len(steps["mtrl"]))
    cells = {
        side: [str(n) if n <= lesson["most"] else f"more than {lesson['most']}" for n in steps[side]] for side in steps
    }
    lines = [
        f"steps until the mean reward is {lesson['enough']}, lr {lesson['lr']:g}",
        "",
        f"| seed | {' | '.join(map(str, seeds))} | median |",
        "|" + "---|" * (2 + len(seeds)),
        *(f"| {side} | {' | '.join(cells[side])} | {found['median'][side]:g} |" for side in steps),
        "",
        f"mean reward of the first {found['had']} steps, mtrl minus TRL with the same start: {mean(ahead):+.4f}"
        + (f", standard error {stdev(ahead) / math.sqrt(len(ahead)):.4f}" if len(ahead) > 1 else ""),
    ]
    return "\n".join(lines)
