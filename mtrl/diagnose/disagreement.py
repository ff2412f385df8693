"""The trajectories of a run on which reward and scorer disagree: who they are, and what they said last."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from mtrl.diagnose.finding import Witness
from mtrl.diagnose.record import Record
from mtrl.evaluation.agreement import Thresholds, Verdict, succeeded
from mtrl.rescore.source import Stored
from mtrl.tracking.text import one_line, short

MOST = 2000
"""Trajectories that are looked at, the newest first."""
SHOWN = 5
END = 160
"""Characters of the last response that are shown: its end, where answers are."""
ENOUGH = 5
"""Successes from which on their rewards say something."""


@dataclass(frozen=True)
class Disagreement:
    """What reward and scorer say of the stored training trajectories."""

    looked_at: int = 0
    """Of whole steps: what was stored because it disagrees is not counted."""
    lenient: int = 0
    """Of those."""
    strict: int = 0
    witnesses: tuple[Witness, ...] = ()
    """The best paid of the lenient ones, of all files."""
    best_lenient: float = 0.0
    fitting_threshold: float | None = None
    """Every success earns at least this and every lenient one less: the claim threshold is in the wrong place."""

    @property
    def lenient_share(self) -> float:
        return self.lenient / self.looked_at if self.looked_at else 0.0


def disagreement(record: Record) -> Disagreement:
    """Look at the newest training trajectories, in the last two windows of steps."""
    since = max(0, record.step - 2 * record.window)
    return _count(record, record.trajectories("disagree", "train", since=since))


def baseline_disagreement(record: Record) -> Disagreement:
    """Look at the evaluation before training, once."""
    if "baseline" not in record.memory:
        record.memory["baseline"] = _count(record, record.trajectories("eval_sampled", "eval_greedy", until=0))
    found: Disagreement = record.memory["baseline"]
    return found


def _count(record: Record, lines: Iterator[Stored]) -> Disagreement:
    success = float(record.setting("evaluation.success_threshold"))
    thresholds = Thresholds(success, record.unit)
    stored = islice(lines, MOST)
    lenient: list[Stored] = []
    looked_at = counted = strict = 0
    earned: list[float] = []
    """By successes."""
    for line in stored:
        trajectory = line.trajectory
        if trajectory is None or trajectory.score is None:
            continue
        verdict, whole = thresholds.verdict(trajectory), line.kind != "disagree"
        looked_at += whole
        strict += whole and verdict == Verdict.STRICT
        if verdict == Verdict.LENIENT:
            lenient.append(line)
            counted += whole
        if succeeded(trajectory, success):
            earned.append(trajectory.reward)
    lenient.sort(key=lambda line: -_reward(line))
    best = _reward(lenient[0]) if lenient else 0.0
    lowest = min(earned, default=0.0)
    fits = lenient and len(earned) >= ENOUGH and lowest > 1.05 * best
    shown = tuple(map(_witness, lenient[:SHOWN]))
    return Disagreement(looked_at, counted, strict, shown, best, round(lowest, 6) if fits else None)


def _reward(line: Stored) -> float:
    return line.trajectory.reward if line.trajectory else 0.0


def _witness(line: Stored) -> Witness:
    trajectory = line.trajectory
    assert trajectory is not None
    text = trajectory.turns[-1].text if trajectory.turns else ""
    judged = f"reward {short(trajectory.reward)}, score {short(trajectory.score or 0.0)}"
    return Witness(f"{line.file.parent.name}/{line.where}", f"{judged}: {one_line(text[-END:])}")
