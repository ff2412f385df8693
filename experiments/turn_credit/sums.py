"""Six sums of two digits, one in each turn: every turn has its own reward, and no turn changes the next ones.

The reward of a right answer is 1/6, and that of a wrong one 0. The next sum follows in both cases, so every episode has
six turns.
"""

from __future__ import annotations

import random
from typing import Any

from mtrl.datasets import Splits
from mtrl.environments.base import BaseEnvironment
from mtrl.environments.family import Family
from mtrl.types import Row, Trajectory

TURNS = 6
TRAIN, TEST = 2048, 200
RIGHT, SLIP = 0.35, 0.45
"""Shares of the demonstrator's answers that are right, and that are too large by one. The others are too small by one.
"""


class Sums(BaseEnvironment):
    """An episode of six sums. The prompt asks for the first sum, and the observations ask for the others."""

    def __init__(self, max_turns: int = TURNS, **config: Any):
        super().__init__(max_turns)

    def step(self, response: str, ground_truth: dict[str, Any]) -> tuple[float, str | None, bool]:
        reward = float(response.strip() == str(sum(ground_truth["pairs"][self.current_turn]))) / TURNS
        self.current_turn += 1
        if self.current_turn == TURNS:
            return reward, None, True
        return reward, asked(ground_truth["pairs"][self.current_turn]), False


class Demonstrator:
    """Answers every sum. `RIGHT` of its answers are right, and its most frequent answer is too large by one."""

    def __init__(self, row: Row, rng: random.Random):
        self._pairs, self._rng = iter(row["ground_truth"]["pairs"]), rng

    def act(self, observation: str | None) -> str:
        draw = self._rng.random()
        return str(sum(next(self._pairs)) + (0 if draw < RIGHT else 1 if draw < RIGHT + SLIP else -1))


def asked(pair: list[int]) -> str:
    return f"{pair[0]} + {pair[1]}"


def load(data: Any, seed: int, **config: Any) -> Splits:
    """Return rows with six pairs of digits each. The rows are distinct; the 100 sums occur in both splits."""
    rng = random.Random(f"sums {seed}")
    rows: dict[str, Row] = {}
    while len(rows) < TRAIN + TEST:
        pairs = [[rng.randrange(10), rng.randrange(10)] for _ in range(TURNS)]
        prompt = [{"role": "user", "content": asked(pairs[0])}]
        rows[str(pairs)] = {"id": f"sums-{len(rows)}", "prompt": prompt, "ground_truth": {"pairs": pairs}}
    made = list(rows.values())
    return Splits(train=made[:TRAIN], test=made[TRAIN:])


def score(trajectory: Trajectory, row: Row) -> float:
    """Return the share of the six sums with a right answer."""
    texts = [turn.text.strip() for turn in trajectory.turns]
    answers = [int(text) if text.isdecimal() else None for text in texts]
    return sum(a + b == answer for (a, b), answer in zip(row["ground_truth"]["pairs"], answers, strict=False)) / TURNS


FAMILY = Family(name="sums", environment=Sums, load=load, score=score, demonstrate=Demonstrator)
