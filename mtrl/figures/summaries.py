"""Statistics of stored episodes: by step, by turn and by verdict."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from mtrl.figures.episodes import StoredEpisode, TurnFacts

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
TURNS = 24
"""Number of positions of turns that are shown; later turns are left out."""


@dataclass(frozen=True)
class Quantiles:
    """Quantiles of some values in each of several places (steps, or positions of turns)."""

    places: list[int]
    values: np.ndarray
    """[places, quantiles], with the quantiles in the order of QUANTILES."""
    counts: list[int]

    def __bool__(self) -> bool:
        return bool(self.places)


def quantiles(values: Iterable[tuple[int, float]]) -> Quantiles:
    """Return the quantiles of `(place, value)` pairs by place, with linear interpolation."""
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
    """[names, positions]: means over the turns that reported the name; NaN if no turn did."""
    reported: np.ndarray
    """[names, positions]: number of turns that reported the name."""
    counts: list[int]
    """Number of turns at each position."""

    @property
    def per_turn(self) -> np.ndarray:
        """[names, positions]: means over all turns at the position; a turn that did not report the name counts as 0."""
        return np.nan_to_num(self.means) * self.reported / np.maximum(self.counts, 1)

    def rows(self, names: Sequence[str]) -> np.ndarray:
        """Return [names, positions]: the means of these names; NaN for a name that no turn reported."""
        missing = np.full(len(self.counts), np.nan)
        found = [self.means[self.names.index(name)] if name in self.names else missing for name in names]
        return np.array(found).reshape(len(names), len(self.counts))

    def has(self, names: Sequence[str]) -> bool:
        """Whether any turn reported any of these names."""
        return bool(set(names) & set(self.names))


def by_turn(episodes: Iterable[StoredEpisode], numbers: Callable[[TurnFacts], dict[str, float]]) -> ByTurn:
    """Return the means over the turns that reported a name, for each of the first TURNS positions."""
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
    """Episodes with nearly the same score and reward."""

    score: float
    """Score at the middle of the cell."""
    reward: float
    """Reward at the middle of the cell."""
    count: int
    verdict: str
    """Verdict of all episodes of the cell; cells do not mix verdicts."""


def cells(episodes: Sequence[StoredEpisode], bins: int = 24) -> list[Cell]:
    """Count the scored episodes on a grid with `bins` bins along both axes.

    At most `bins` different values keep their exact positions; more values are rounded to the grid.
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


def shares(episodes: Sequence[StoredEpisode], of: Callable[[StoredEpisode], float]) -> dict[int, float]:
    """Return step -> mean of a number over the episodes of the step."""
    found: defaultdict[int, list[float]] = defaultdict(list)
    for episode in episodes:
        found[episode.step].append(of(episode))
    return {step: sum(values) / len(values) for step, values in sorted(found.items())}
