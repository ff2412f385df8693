"""One game of tic-tac-toe. A response without one move to a free cell loses the game."""

from __future__ import annotations

from typing import Any, ClassVar

from envs.tic_tac_toe import board
from envs.tic_tac_toe.prompts import FORFEITED
from mtrl.environments.base import StepResult
from mtrl.environments.roles import RoleEnvironment
from mtrl.errors import UserError
from mtrl.types import Message, Row

OPEN, CLOSE = "<move>", "</move>"
MOST_MOVES = 5
"""Number of moves of the role that begins in the longest game."""


def parse_move(response: str) -> str | None:
    """Return the content of the only `<move>…</move>` of a response, without its thinking; None if there is not exactly
    one."""
    visible = response.rpartition("</think>")[2]
    if visible.count(OPEN) != 1 or visible.count(CLOSE) != 1:
        return None
    move, closed, _ = visible.partition(OPEN)[2].partition(CLOSE)
    return move.strip() if closed else None


class TicTacToeEnv(RoleEnvironment):
    """The roles `x`, which begins, and `o` take cells in turn. The reward is 1 for a win, -1 for a loss, else 0."""

    roles = ("x", "o")
    reward_schemes: ClassVar[tuple[str, ...]] = ("default",)

    def __init__(self, max_turns: int = MOST_MOVES, **config: Any):
        super().__init__(max_turns)
        if max_turns < MOST_MOVES:
            raise UserError(
                f"generator.max_turns={max_turns} ends a game before the board is full; set it to {MOST_MOVES} or more"
            )

    def deal(self, row: Row) -> None:
        self.board, self.mover, self.forfeited = board.EMPTY, "x", None
        self.order, self.rules = row["ground_truth"]["order"], row["prompt"][:-1]
        self.valid = {"x": True, "o": True}

    def opening(self, role: str) -> list[Message]:
        return [*self.rules, {"role": "user", "content": board.view(self.board, role)}]

    def act(self, role: str, response: str) -> None:
        move = parse_move(response)
        self.valid[role] = move in board.free(self.board)
        if move is None or not self.valid[role]:
            self.forfeited, self.mover = role, None
            return
        self.board = board.placed(self.board, move, role)
        self.mover = None if board.is_over(self.board) else board.OTHER[role]

    def result(self, role: str) -> StepResult:
        other = board.OTHER[role]
        won = board.wins(self.board, role) or self.forfeited == other
        lost = board.wins(self.board, other) or self.forfeited == role
        seen = board.view(self.board, role)
        return StepResult(
            reward=float(won) - float(lost),
            observation=f"{seen} ; {FORFEITED}" if self.forfeited == other else seen,
            done=self.mover is None,
            components={"won": float(won), "lost": -float(lost)},
            metrics={"invalid": float(not self.valid[role])},
        )

    def scripted(self, role: str) -> str:
        return f"{OPEN}{board.reply(self.board, role, self.order)}{CLOSE}"
