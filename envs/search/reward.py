"""The rewards of turns."""

from __future__ import annotations

from dataclasses import dataclass

from mtrl.errors import UserError

SCHEMES = ("default", "progress", "f1", "mt_ppo")
MALFORMED = -0.1
MOST_MALFORMED = 5
"""Maximum number of malformed turns with a cost, so that the total reward of an episode is at least -0.5."""
HIT = 0.2
"""Reward that `progress` gives in advance for finding the answer."""


@dataclass(frozen=True)
class Outcome:
    """The result of a turn."""

    kind: str | None
    """Kind of turn: search, answer, or None for a malformed turn."""
    correct: bool = False
    """Whether the answer is one of the aliases; False for other turns."""
    f1: float = 0.0
    """SQuAD's F1 of the answer; 0 for other turns."""
    hit: bool = False
    """Whether an alias occurs in the passages shown after a search; False for other turns."""


class EpisodeReward:
    """Computes the rewards of the turns of one episode.

    - `default`: 1.0 for a right answer; -0.1 for each of the first five malformed turns.
    - `progress`: as `default`, but the first search that finds the answer receives 0.2 of the 1.0 in advance.
    - `f1`: as `default`, but an answer receives its F1, so that a wrong one with some of the words of a right one
      receives a part of the reward.
    - `mt_ppo`: the turn rewards of arXiv 2505.11821v2, see `_mt_ppo`. It rewards repetitions of the same search.
    """

    def __init__(self, scheme: str):
        if scheme not in SCHEMES:
            raise UserError(f"reward.scheme={scheme} is not known to search; choose one of {', '.join(SCHEMES)}")
        self.scheme = scheme
        self.malformed_turns = 0
        self.advance = 0.0

    def components(self, outcome: Outcome, done: bool) -> dict[str, float]:
        """Return the components of this turn's reward, which is their sum."""
        if self.scheme == "mt_ppo":
            return _mt_ppo(outcome, done)
        self.malformed_turns += outcome.kind is None
        costs = outcome.kind is None and self.malformed_turns <= MOST_MALFORMED
        components = {
            "correct": 1.0 - self.advance if outcome.correct else 0.0,
            "malformed": MALFORMED if costs else 0.0,
        }
        if self.scheme == "f1":
            components["correct"] = outcome.f1
        if self.scheme == "progress":
            components["found"] = HIT if outcome.hit and not self.advance else 0.0
            self.advance += components["found"]
        return components


def _mt_ppo(outcome: Outcome, done: bool) -> dict[str, float]:
    """Return the components of a turn. The last turn receives 1 for a right answer, 0.2 for a wrong one, -1 for none.
    An earlier turn receives +0.1 if it is well-formed, else -0.2; and -0.1 for a search, +0.3 if the search finds the
    answer."""
    if done:
        outcome_reward = 1.0 if outcome.correct else 0.2 if outcome.kind == "answer" else -1.0
        return {"outcome": outcome_reward, "format": 0.0, "search": 0.0, "found": 0.0}
    return {
        "outcome": 0.0,
        "format": -0.2 if outcome.kind is None else 0.1,
        "search": -0.1 if outcome.kind == "search" else 0.0,
        "found": 0.3 if outcome.hit else 0.0,
    }
