"""The data that figures need from stored trajectories. Files are read line by line, and at most `CAP` trajectories of a
run are used."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import fmean

from mtrl.errors import UserError
from mtrl.record.run import Run
from mtrl.record.trajectories import whole_lines
from mtrl.scoring.agreement import Thresholds, TrajectoryAgreement, claimed, succeeded
from mtrl.types import Trajectory, Turn, trajectory_from_dict

CAP = 8192
"""Maximum number of trajectories read per run. If there are more, a random sample with a fixed seed is read."""
NAME = re.compile(r"(train|eval_greedy|eval_sampled)_step_(\d+)")
"""Pattern of the files that represent all episodes of their step. `disagree` files do not, because their trajectories
were selected."""

_TOOL = re.compile(r"tool/(.+)/calls")


@dataclass(frozen=True, slots=True)
class TurnFacts:
    tokens: int
    """Number of sampled tokens."""
    reward: float
    components: dict[str, float]
    metrics: dict[str, float]
    """Counts of the environment in this turn; the number of calls of a tool has the tool's name."""
    advantage: float | None
    """Mean advantage over the tokens of the turn; None if it has no advantages."""


@dataclass(frozen=True, slots=True)
class StoredEpisode:
    kind: str
    """train | eval_greedy | eval_sampled"""
    step: int
    reward: float
    score: float | None
    verdict: TrajectoryAgreement
    claimed: bool
    succeeded: bool
    stop: str
    context: int
    """Number of tokens of the whole conversation at its end."""
    turns: tuple[TurnFacts, ...]

    @property
    def tokens(self) -> int:
        return sum(turn.tokens for turn in self.turns)


@dataclass(frozen=True)
class StoredEpisodes:
    """Episodes in the order of their files, and the number of episodes on disk."""

    read: list[StoredEpisode]
    stored: int

    @classmethod
    def together(cls, parts: Sequence[StoredEpisodes]) -> StoredEpisodes:
        return cls([episode for part in parts for episode in part.read], sum(part.stored for part in parts))

    def of(self, kind: str) -> list[StoredEpisode]:
        return [episode for episode in self.read if episode.kind == kind]

    @property
    def note(self) -> str:
        """Sentence for captions if not all episodes were read, else empty."""
        if len(self.read) == self.stored:
            return ""
        return f" {len(self.read):,} of {self.stored:,} stored trajectories, a random sample."


def read_episodes(run: Run, cap: int = CAP) -> StoredEpisodes:
    """Return the stored trajectories of a run: all, or a random sample of `cap` with a fixed seed.

    Raises:
        UserError: A line to be read is not a trajectory.
    """
    files = [(path, found) for path in sorted(run.files()) if (found := NAME.fullmatch(path.stem))]
    counts = [_lines(path) for path, _ in files]
    total = sum(counts)
    chosen = set(random.Random(0).sample(range(total), cap)) if total > cap else set(range(total))
    thresholds = run.thresholds
    episodes: list[StoredEpisode] = []
    first = 0
    for (path, found), count in zip(files, counts, strict=True):
        with path.open("rb") as file:
            for number, line in enumerate(islice(whole_lines(file), count)):
                if first + number not in chosen:
                    continue
                try:
                    episodes.append(
                        episode_of(found[1], int(found[2]), trajectory_from_dict(json.loads(line)), thresholds)
                    )
                except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
                    raise UserError(f"{path}:{number + 1} is no trajectory; remove the line") from error
        first += count
    return StoredEpisodes(episodes, total)


def _lines(path: Path) -> int:
    with path.open("rb") as file:
        return sum(1 for _ in whole_lines(file))


def episode_of(kind: str, step: int, trajectory: Trajectory, thresholds: Thresholds) -> StoredEpisode:
    return StoredEpisode(
        kind,
        step,
        trajectory.reward,
        trajectory.score,
        thresholds.verdict(trajectory),
        claimed(trajectory, thresholds.claim),
        succeeded(trajectory, thresholds.success),
        str(trajectory.stop_reason),
        trajectory.context_tokens,
        tuple(map(_turn, trajectory.turns)),
    )


def _turn(turn: Turn) -> TurnFacts:
    return TurnFacts(
        len(turn.action_ids),
        turn.reward,
        {name: float(value) for name, value in turn.components.items()},
        _metrics(turn),
        fmean(turn.advantages) if turn.advantages else None,
    )


def _metrics(turn: Turn) -> dict[str, float]:
    """Return the metrics of a turn, with `tool/NAME/calls` renamed to NAME. If the environment did not count the calls,
    the calls of the message are counted."""
    found = {_TOOL.sub(r"\1", name): float(value) for name, value in turn.metrics.items()}
    if not any(map(_TOOL.fullmatch, turn.metrics)):
        for call in turn.message.get("tool_calls") or []:
            name = f"{call.get('function', {}).get('name', '?')}" if isinstance(call, dict) else "?"
            found[name] = found.get(name, 0.0) + 1.0
    return found
