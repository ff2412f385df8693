"""A weak demonstrator for the warm start of the tiny policy.

It demonstrates every kind of move, but usually answers with a number of the question: a policy cloned from it is mostly
wrong, greedy or sampled. Reinforcement learning then teaches the choice of the right move. Each move copies a number,
so that each demonstration teaches to copy. The proportions below set that starting point.
"""

from __future__ import annotations

import random
import re
from decimal import Decimal

from envs.gsm8k.calculator import calculate
from mtrl.types import Row

FIRST_RIGHT_CALC = 0.22
"""Share of first moves that compute the right expression."""
FIRST_WRONG_CALC = 0.22
"""Share of first moves that compute a wrong expression; the other first moves guess."""
RETRY_RIGHT_CALC = 0.12
RETRY_WRONG_CALC = 0.28
"""The same two shares for moves after feedback."""
USE_RESULT = 0.98
"""Share of calculator results, right or wrong, that become the answer; otherwise the demonstrator guesses."""
RIGHT_GUESS = 0.2
"""Share of right guesses without a calculator, so that there are successes to reinforce."""


class WeakPlayer:
    """Runs one episode of one training row."""

    def __init__(self, row: Row, rng: random.Random):
        self.answer = int(Decimal(row["ground_truth"]["answer"]))
        computes = row.get("source") == "synthetic" and row["calculator"]
        self.expression = row["expression"] if computes else None
        numbers = {int(digits) for digits in re.findall(r"\d+", row["prompt"][-1]["content"])} - {self.answer}
        self.numbers = sorted(numbers) or [self.answer + 1]
        self.rng = rng
        self.computed = False

    def act(self, observation: str | None) -> str:
        """Return the next response."""
        if self.computed and self.rng.random() < USE_RESULT:
            self.computed = False
            return f"#### {observation}"
        self.computed = False
        if self.expression is None:
            return self._guess(RIGHT_GUESS)
        first = observation is None
        right, wrong = (FIRST_RIGHT_CALC, FIRST_WRONG_CALC) if first else (RETRY_RIGHT_CALC, RETRY_WRONG_CALC)
        move = self.rng.random()
        if move < right + wrong:
            self.computed = True
            return f"<calc>{self.expression if move < right else self._wrong_expression()}</calc>"
        return self._guess(0.0)

    def _guess(self, right: float) -> str:
        """Return the answer with probability `right`, or else another number of the question."""
        if self.rng.random() < right:
            return f"#### {self.answer}"
        return f"#### {self.rng.choice(self.numbers)}"

    def _wrong_expression(self) -> str:
        """Return the right expression with one operator replaced by another that changes its value."""
        assert self.expression
        operators = [index for index, character in enumerate(self.expression) if character in "+-*/"]
        while True:
            index = self.rng.choice(operators)
            wrong = self.expression[:index] + self.rng.choice("+-*") + self.expression[index + 1 :]
            if calculate(wrong) != str(self.answer):
                return wrong


def demonstrate(row: Row, rng: random.Random) -> WeakPlayer:
    """Return a weak demonstrator for `row`, which must be a training row."""
    if row.get("split") == "test":
        raise ValueError(f"row {row['id']} is held out and must not be demonstrated")
    return WeakPlayer(row, rng)
