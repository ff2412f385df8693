"""The reward of an ended conversation: the state of the orders, and the codes that the customer was told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from envs.service.speech import codes
from mtrl.errors import UserError


@dataclass(frozen=True)
class Verdict:
    """The parts of the task, and whether each is done."""

    state: bool
    """Whether every order is as it is after the reference action."""
    told: bool
    """Whether the customer was told each required code, and no code that the customer may not hear."""

    @property
    def reward(self) -> float:
        """1.0 if all is done, else 0.0."""
        return float(self.state and self.told)

    @property
    def metrics(self) -> dict[str, float]:
        return {"state": float(self.state), "told": float(self.told)}


def judge(state: dict[str, Any], speeches: list[str], truth: dict[str, Any]) -> Verdict:
    """Compare an episode with the ground truth, as τ²-bench does (Barres et al. 2025): the final state of the database
    equals the state after the reference actions, and the required information was communicated.

    Args:
        state: final state of the orders, see `Store.state`.
        speeches: the agent's words in each turn.
        truth: see `Case.truth`.

    Raises:
        UserError: the ground truth lacks a key.
    """
    if missing := {"orders", "told", "tellable"} - truth.keys():
        raise UserError(f"ground_truth lacks {min(missing)}; give orders, told and tellable, as the generated rows do")
    named = set().union(*map(codes, speeches))
    return Verdict(state == truth["orders"], set(truth["told"]) <= named <= {*truth["told"], *truth["tellable"]})
