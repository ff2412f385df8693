"""Numbers of stored episodes: by step, by turn, by verdict."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from mtrl.figures.episodes import Episode, TurnFacts

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
TURNS = 24
"""Positions that are told apart; later turns are left out."""


@dataclass(frozen=True)
class Quantiles:
    """Quantiles of some values in each of several places (steps, or positions of turns)."""

    places: list[int]
    values: np.ndarray
    """[places, quantiles], the quantiles in the order of QUANTILES."""
    counts: list[int]

    def __bool__(self) -> bool:
        return bool(self.places)


def quantiles(values: Iterable[tuple[int, float]]) -> Quantiles:
    """Quantiles of `(place, value)` pairs by place, linear between the values."""
    found: defaultdict[int, list[float]] = defaultdict(list)
    for place, value in values:
        found[place].append(value)
    places = sorted(found)
    table = np.array([np.quantile(found[place], QUANTILES) for place in places]).reshape(len(places), len(QUANTILES))
    return Quantiles(places, table, [len(found[place]) for place in places])


@dataclass(frozen=True)
class ByTurn:
    """Named numbers by the position of the turn in its episode."""

    names: list[str]
    means: np.ndarray
    """[names, positions]; NaN where no turn reported the name."""
    reported: np.ndarray
    """[names, positions]: turns that reported the name."""
    counts: list[int]
    """Turns at each position."""

    @property
    def per_turn(self) -> np.ndarray:
        """[names, positions]: means over all turns at the position, where one that did not report the name adds 0."""
        return np.nan_to_num(self.means) * self.reported / np.maximum(self.counts, 1)

    def rows(self, names: Sequence[str]) -> np.ndarray:
        """[names, positions]: the means of these names; NaN for one that no turn reported."""
        missing = np.full(len(self.counts), np.nan)
        found = [self.means[self.names.index(name)] if name in self.names else missing for name in names]
        return np.array(found).reshape(len(names), len(self.counts))

    def has(self, names: Sequence[str]) -> bool:
        """Whether any turn reported any of them."""
        return bool(set(names) & set(self.names))


def by_turn(episodes: Iterable[Episode], numbers: Callable[[TurnFacts], dict[str, float]]) -> ByTurn:
    """Means over the turns at each position that reported a name, the first TURNS positions."""
    found: defaultdict[str, np.ndarray] = defaultdict(lambda: np.zeros((2, TURNS)))  # sums, reports
    turns: Counter[int] = Counter()
    for episode in episodes:
        for position, turn in enumerate(episode.turns[:TURNS]):
            turns[position] += 1
            for name, value in numbers(turn).items():
                found[name][:, position] += value, 1
    names, width = sorted(found), len(turns)
    table = np.array([found[name][:, :width] for name in names]).reshape(len(names), 2, width)
    sums, reported = table[:, 0], table[:, 1]
    means = np.divide(sums, reported, out=np.full_like(sums, np.nan), where=reported > 0)
    return ByTurn(names, means, reported, [turns[position] for position in range(width)])


@dataclass(frozen=True)
class Cell:
    """Episodes of nearly the same score and reward."""

    score: float
    """Of the cell's middle, as is its reward."""
    reward: float
    count: int
    verdict: str
    """That of all of them: cells do not mix verdicts."""


def cells(episodes: Sequence[Episode], bins: int = 24) -> list[Cell]:
    """Episodes that were scored, counted on a grid of `bins` widths along both axes.

    Few different values keep their exact places: only what is finer than the grid is rounded to it.
    """
    scored = [
        (episode.score, episode.reward, str(episode.verdict)) for episode in episodes if episode.score is not None
    ]
    scores = _rounded([score for score, _, _ in scored], bins)
    rewards = _rounded([reward for _, reward, _ in scored], bins)
    found = Counter(zip(scores, rewards, (verdict for _, _, verdict in scored), strict=True))
    return [Cell(score, reward, count, verdict) for (score, reward, verdict), count in sorted(found.items())]


def _rounded(values: list[float], bins: int) -> list[float]:
    if len(set(values)) <= bins:
        return values
    low, width = min(values), (max(values) - min(values)) / bins
    return [low + (min(int((value - low) / width), bins - 1) + 0.5) * width for value in values]


def shares(episodes: Sequence[Episode], of: Callable[[Episode], float]) -> dict[int, float]:
    """Step -> mean of a number over the episodes of the step."""
    found: defaultdict[int, list[float]] = defaultdict(list)
    for episode in episodes:
        found[episode.step].append(of(episode))
    return {step: sum(values) / len(values) for step, values in sorted(found.items())}
