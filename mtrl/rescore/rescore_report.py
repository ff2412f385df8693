"""The report of a rescoring: a table for the terminal, JSON for programs."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any, TextIO

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from mtrl.rescore.replay import LeftOut, Rescored
from mtrl.scoring.agreement import Thresholds
from mtrl.types import EPSILON
from mtrl.utils.text import MISSING, decimal, one_line, percent, short, signed

LISTED = 3
"""Maximum number of disagreements per kind, and of left-out trajectories per reason, that the table lists; the JSON has
all."""
REASONS = {
    "unreadable": "lines that are no trajectories",
    "failed": "episodes that failed in the run or have no turn",
    "no row": "episodes whose row is not in the data",
    "differs": "episodes whose observations differ in the replay",
    "broke": "episodes for which the environment, the reward or the scorer raises an error now",
}


@dataclass
class RescoreReport:
    """The results of all trajectories that were read."""

    rescored: list[Rescored]
    left_out: list[LeftOut]
    thresholds: Thresholds
    """Smallest score, and smallest reward, that mean success."""
    replayed: bool
    """Whether the responses were replayed in the environment."""

    def summary(self, rescored: Sequence[Rescored]) -> dict[str, float | int | None]:
        """Return the means of reward and success before and after, and the number of changed trajectories."""
        scores = [line.score_before for line in rescored]
        return {
            "episodes": len(rescored),
            "reward_before": fmean(line.reward_before for line in rescored) if rescored else None,
            "reward_after": fmean(line.reward_after for line in rescored) if rescored else None,
            "success_before": fmean(self._succeeds(s) for s in scores) if rescored and None not in scores else None,
            "success_after": fmean(self._succeeds(line.score_after) for line in rescored) if rescored else None,
            "changed": sum(line.changed for line in rescored),
        }

    def kinds(self) -> dict[str, list[Rescored]]:
        kinds: dict[str, list[Rescored]] = {}
        for line in self.rescored:
            kinds.setdefault(line.kind, []).append(line)
        return dict(sorted(kinds.items()))

    def rewarded_but_rejected(self) -> list[Rescored]:
        """Return the trajectories with full reward that the scorer counts as no success."""
        return [line for line in self._refused() if self._claims(line)]

    def accepted_but_unrewarded(self) -> list[Rescored]:
        """Return the trajectories without full reward that the scorer counts as success."""
        return [line for line in self._accepted() if not self._claims(line)]

    def to_dict(self, source: str, overrides: Sequence[str]) -> dict[str, Any]:
        """Return the content of the JSON."""
        return {
            "source": source,
            "overrides": list(overrides),
            "environment_replayed": self.replayed,
            "all": self.summary(self.rescored),
            "kinds": {kind: self.summary(lines) for kind, lines in self.kinds().items()},
            "left_out": {why: count for why, count in Counter(line.why for line in self.left_out).items()},
            "rewarded_but_rejected": [line.where for line in self.rewarded_but_rejected()],
            "accepted_but_unrewarded": [line.where for line in self.accepted_but_unrewarded()],
            "trajectories": [asdict(line) for line in self.rescored],
            "not_rescored": [asdict(line) for line in self.left_out],
        }

    def show(self, file: TextIO | None = None, width: int | None = None) -> None:
        console = Console(file=file or sys.stdout, width=width, highlight=False, markup=False, emoji=False)
        if self.rescored:
            console.print(self._table())
        if not self.replayed:
            console.print(
                Text(
                    "the environment was not replayed: all components of the reward are functions of the messages. "
                    "Rows are those with the ids of the trajectories, so data and seed must be those of the recording",
                    style="dim",
                )
            )
        ends = {
            "highest reward of the episodes that the scorer rejects": self._refused(),
            "lowest reward of the episodes that the scorer accepts": self._accepted(),
        }
        for title, lines in ends.items():
            for line in lines[:1]:
                console.print(Text(f"{title}: {_episode(line)}"), soft_wrap=True)
        disagreements = {
            "with full reward, rejected by the scorer": self.rewarded_but_rejected(),
            "without full reward, accepted by the scorer": self.accepted_but_unrewarded(),
        }
        for title, lines in disagreements.items():
            for part in _listed(title, [_episode(line) for line in lines], "yellow"):
                console.print(part, soft_wrap=True)
        for why, title in REASONS.items():
            messages = [f"{line.where}  {line.message}" for line in self.left_out if line.why == why]
            for part in _listed(f"not rescored, {title}", messages, "red"):
                console.print(part, soft_wrap=True)

    def _refused(self) -> list[Rescored]:
        """Return the trajectories that the scorer counts as no success, the highest reward first."""
        found = [line for line in self.rescored if not self._succeeds(line.score_after)]
        return sorted(found, key=lambda line: -line.reward_after)

    def _accepted(self) -> list[Rescored]:
        """Return the trajectories that the scorer counts as success, the lowest reward first."""
        return sorted(
            (line for line in self.rescored if self._succeeds(line.score_after)), key=lambda line: line.reward_after
        )

    def _succeeds(self, score: float | None) -> bool:
        return (score or 0.0) >= self.thresholds.success - EPSILON

    def _claims(self, line: Rescored) -> bool:
        return line.reward_after >= self.thresholds.claim - EPSILON

    def _table(self) -> Table:
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
        table.add_column("trajectories")
        for name in ("episodes", "reward before", "after", "success before", "after", "changed"):
            table.add_column(name, justify="right")
        kinds = self.kinds()
        rows = {kind: self.summary(lines) for kind, lines in kinds.items()}
        if len(kinds) > 1:
            rows["all"] = self.summary(self.rescored)
        for kind, values in rows.items():
            shown = [_shown(name, value) for name, value in values.items()]
            table.add_row(Text(one_line(kind, 40)), *shown, style="bold" if kind == "all" and len(kinds) > 1 else "")
        return table


def _shown(name: str, value: float | None) -> str:
    if value is None:
        return MISSING
    show = decimal if name.startswith("reward") else percent if name.startswith("success") else str
    return show(value)


def _episode(line: Rescored) -> str:
    verdict = f"reward {signed(line.reward_after)}, score {short(line.score_after)}"
    return f"{line.where}  {verdict}, row {one_line(line.task_id, 40)}: {one_line(line.last_response, 80)}"


def _listed(title: str, lines: list[str], style: str) -> list[RenderableType]:
    if not lines:
        return []
    more = [Text(f"  … {len(lines) - LISTED} more", style="dim")] if len(lines) > LISTED else []
    shown = [Text(f"  {one_line(text, 400)}") for text in lines[:LISTED]]
    return [Text(f"{len(lines)} {title}", style=f"bold {style}"), *shown, *more]
