"""The interface of environments with several roles, such as the two sides of a game.

The environment says which role moves next (`mover`). It has a fixed opponent of its own (`scripted`) for every role, so
it is also an ordinary environment with one role: the role that the row names takes all turns, and the fixed opponent
answers within `reset` and `step`. Evaluations, warm starts, the pre-flight and `mtrl.play` use it in this form, and a
success rate in them is always against the same opponent. Self-play (`mtrl/rollout/self_play.py`) calls the other
methods.
"""

from __future__ import annotations

from typing import Any, ClassVar

from mtrl.environments.base import BaseEnvironment, StepResult
from mtrl.errors import UserError
from mtrl.types import Message, Row

SELF_PLAY = "self_play"
"""Key of the training rows of self-play. Rows without it are played against the fixed opponent."""


class RoleEnvironment(BaseEnvironment):
    """One episode in which several roles take turns, in any order.

    A subclass defines `roles`, `deal`, `opening`, `act`, `result` and `scripted`. A role has its own conversation: its
    opening messages, its responses, and what `result` returned to it after each of them.
    """

    roles: ClassVar[tuple[str, ...]] = ()
    """Names of the roles. Each row has one of them as its `role`."""
    mover: str | None = None
    """The role that moves next; None when the episode is over. `deal` and `act` set it."""

    def deal(self, row: Row) -> None:
        """Start the episode of `row`, before the first move of any role."""
        raise NotImplementedError(f"{type(self).__name__} does not define deal(row)")

    def opening(self, role: str) -> list[Message]:
        """Return the messages before the first response of a role, which is about to move."""
        raise NotImplementedError(f"{type(self).__name__} does not define opening(role)")

    def act(self, role: str, response: str) -> None:
        """Apply the response of the role that moves."""
        raise NotImplementedError(f"{type(self).__name__} does not define act(role, response)")

    def result(self, role: str) -> StepResult:
        """Return the result of the last response of a role: its reward up to now, and what it observes.

        It is called once per response, when the role moves again or the episode is over; `done` says which.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define result(role)")

    def scripted(self, role: str) -> str:
        """Return the response of the fixed opponent, which takes the role that moves. It depends on the row and on the
        moves alone."""
        raise NotImplementedError(f"{type(self).__name__} does not define scripted(role)")

    def reset(self, row: Row | None = None) -> list[Message] | None:
        """Start the episode of `row` for its role, against the fixed opponent. Return the role's opening messages.

        Raises:
            UserError: the row names no role of the environment.
        """
        super().reset(row)
        assert row is not None
        self.role = role_of(row, self.roles)
        self.deal(row)
        self._answer()
        return self.opening(self.role)

    def step(self, response: str, ground_truth: dict[str, Any]) -> StepResult:
        """Apply the response of the row's role and the answers of the fixed opponent. Return the role's result."""
        self.current_turn += 1
        self.act(self.role, response)
        self._answer()
        return self.result(self.role)

    def _answer(self) -> None:
        while self.mover not in (None, self.role):
            self.act(str(self.mover), self.scripted(str(self.mover)))


def role_of(row: Row, roles: tuple[str, ...]) -> str:
    """Return the role of a row.

    Raises:
        UserError: the row names no role of the environment.
    """
    role = row.get("role")
    if role not in roles:
        raise UserError(f"row {row.get('id')} has the role {role!r}; it must be one of {', '.join(roles)}")
    return str(role)
