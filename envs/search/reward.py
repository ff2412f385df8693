"""What a turn is paid."""

from __future__ import annotations

from dataclasses import dataclass

from mtrl.errors import UserError

SCHEMES = ("default", "progress", "mt_ppo")
MALFORMED = -0.1
MOST_MALFORMED = 5
"""Malformed turns that cost something; an episode is never paid less than -0.5."""
HIT = 0.2
"""What `progress` pays in advance for finding the answer."""


@dataclass(frozen=True)
class Outcome:
    """What a turn led to."""

    kind: str | None
    """search, answer, or None (malformed)"""
    correct: bool = False
    """Of an answer: it is one of the aliases."""
    hit: bool = False
    """Of a search: an alias stands in what is shown."""


class EpisodeReward:
    """Pays the turns of one episode.

    - `default`: 1.0 for a right answer; -0.1 for each malformed turn, the first five of them.
    - `progress`: as `default`, but the first search that finds the answer is paid 0.2 of the 1.0 in advance.
    - `mt_ppo`: the turn rewards of arXiv 2505.11821v2, see `_mt_ppo`. It pays for the same search again and again.
    """

    def __init__(self, scheme: str):
        if scheme not in SCHEMES:
            raise UserError(f"reward.scheme={scheme} is not known to search; choose one of {', '.join(SCHEMES)}")
        self.scheme = scheme
        self.malformed_turns = 0
        self.advance = 0.0

    def pay(self, outcome: Outcome, done: bool) -> dict[str, float]:
        """The components of this turn's reward, which is their sum."""
        if self.scheme == "mt_ppo":
            return _mt_ppo(outcome, done)
        self.malformed_turns += outcome.kind is None
        costs = outcome.kind is None and self.malformed_turns <= MOST_MALFORMED
        paid = {
            "correct": 1.0 - self.advance if outcome.correct else 0.0,
            "malformed": MALFORMED if costs else 0.0,
        }
        if self.scheme == "progress":
            paid["found"] = HIT if outcome.hit and not self.advance else 0.0
            self.advance += paid["found"]
        return paid


def _mt_ppo(outcome: Outcome, done: bool) -> dict[str, float]:
    """The last turn: 1 for a right answer, 0.2 for a wrong one, -1 for none. Before: +0.1 for a well-formed turn, -0.2
    for another; -0.1 for a search, +0.3 if it finds the answer."""
    if done:
        outcome_paid = 1.0 if outcome.correct else 0.2 if outcome.kind == "answer" else -1.0
        return {"outcome": outcome_paid, "format": 0.0, "search": 0.0, "found": 0.0}
    return {
        "outcome": 0.0,
        "format": -0.2 if outcome.kind is None else 0.1,
        "search": -0.1 if outcome.kind == "search" else 0.0,
        "found": 0.3 if outcome.hit else 0.0,
    }
