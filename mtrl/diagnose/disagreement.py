"""The trajectories of a run on which reward and scorer disagree: their counts, locations and last responses."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from mtrl.diagnose.finding import Witness
from mtrl.diagnose.record import Record
from mtrl.record.stored import StoredLine, read
from mtrl.scoring.agreement import Thresholds, TrajectoryAgreement, succeeded
from mtrl.utils.text import one_line, short

MOST = 2000
"""Number of trajectories after which no further file is read; the newest files come first."""
SHOWN = 5
END = 160
"""Number of characters shown from the end of the last response, where answers are."""
ENOUGH = 5
"""Minimum number of successes for a decision about the claim threshold."""


@dataclass(frozen=True)
class RewardAgreement:
    """Agreement of reward and scorer on the stored trajectories."""

    looked_at: int = 0
    """Number of scored trajectories of whole steps. Trajectories stored because of a disagreement are not counted."""
    lenient: int = 0
    """Number of counted trajectories that the reward calls solved and the scorer does not."""
    strict: int = 0
    """Number of counted trajectories that the scorer calls solved and the reward does not."""
    witnesses: tuple[Witness, ...] = ()
    """Lenient trajectories with the highest rewards, from all files."""
    best_lenient: float = 0.0
    fitting_threshold: float | None = None
    """Claim threshold that separates every success from every lenient trajectory; None if there is none. If it exists,
    the configured threshold is wrong."""

    @property
    def lenient_share(self) -> float:
        return self.lenient / self.looked_at if self.looked_at else 0.0


@dataclass(frozen=True)
class _Tally:
    """Counts of one file of trajectories."""

    lines: int
    looked_at: int
    lenient: int
    strict: int
    earned: tuple[float, ...]
    """Rewards of the successes."""
    witnesses: tuple[tuple[float, Witness], ...]
    """Lenient trajectories with the highest rewards, each with its reward."""


def disagreement(record: Record) -> RewardAgreement:
    """Compare reward and scorer on the newest training trajectories, from the last two windows of steps."""
    since = max(0, record.step - 2 * record.window)
    return _count(record, record.files("disagree", "train", since=since))


def baseline_disagreement(record: Record) -> RewardAgreement:
    """Compare reward and scorer on the evaluation before training."""
    return _count(record, record.files("eval_sampled", "eval_greedy", until=0))


def _count(record: Record, files: Iterable[Path]) -> RewardAgreement:
    tallies: list[_Tally] = []
    for file in files:
        if sum(tally.lines for tally in tallies) >= MOST:
            break
        tallies.append(_remembered(record, file))
    witnesses = sorted((each for tally in tallies for each in tally.witnesses), key=lambda each: -each[0])[:SHOWN]
    earned = [reward for tally in tallies for reward in tally.earned]
    best, lowest = witnesses[0][0] if witnesses else 0.0, min(earned, default=0.0)
    fits = witnesses and len(earned) >= ENOUGH and lowest > 1.05 * best
    return RewardAgreement(
        sum(tally.looked_at for tally in tallies),
        sum(tally.lenient for tally in tallies),
        sum(tally.strict for tally in tallies),
        tuple(witness for _, witness in witnesses),
        best,
        round(lowest, 6) if fits else None,
    )


def _remembered(record: Record, file: Path) -> _Tally:
    success, found = float(record.setting("evaluation.success_threshold")), file.stat()
    key = ("tally", file, found.st_mtime_ns, found.st_size)  # a run that is set back writes the file again
    return record.once(key, lambda: _tally(file, Thresholds(success, record.unit)))


def _tally(file: Path, thresholds: Thresholds) -> _Tally:
    lenient: list[StoredLine] = []
    lines = looked_at = counted = strict = 0
    earned: list[float] = []
    for line in read(file):
        lines += 1
        trajectory = line.trajectory
        if trajectory is None or trajectory.score is None:
            continue
        verdict, whole = thresholds.verdict(trajectory), line.kind != "disagree"
        looked_at += whole
        strict += whole and verdict == TrajectoryAgreement.STRICT
        if verdict == TrajectoryAgreement.LENIENT:
            lenient.append(line)
            counted += whole
        if succeeded(trajectory, thresholds.success):
            earned.append(trajectory.reward)
    best = sorted(((_reward(line), line) for line in lenient), key=lambda each: -each[0])[:SHOWN]
    shown = tuple((reward, _witness(line)) for reward, line in best)
    return _Tally(lines, looked_at, counted, strict, tuple(earned), shown)


def _reward(line: StoredLine) -> float:
    return line.trajectory.reward if line.trajectory else 0.0


def _witness(line: StoredLine) -> Witness:
    trajectory = line.trajectory
    assert trajectory is not None
    text = trajectory.turns[-1].text if trajectory.turns else ""
    judged = f"reward {short(trajectory.reward)}, score {short(trajectory.score or 0.0)}"
    return Witness(f"{line.file.parent.name}/{line.where}", f"{judged}: {one_line(text[-END:])}")
