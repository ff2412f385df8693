"""A task whose turns are paid independently: six sums, one after another, each worth a sixth.

A question does not depend on the answer before it, and no reply says whether that was right. So what a turn earns says
nothing about any other turn, and credit for the whole trajectory gives a turn five times as much noise as signal.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from mtrl.environments.base import BaseEnvironment, StepResult
from mtrl.environments.family import Family, Recital, Splits
from mtrl.types import Row, Trajectory

SUMS = 6
RIGHT = 0.85
"""Share of the demonstrated answers that are right; 0.85**6 = 0.38 of the episodes are right throughout."""


class SumsEnv(BaseEnvironment):
    """Six turns, each an answer to the question before it."""

    def reset(self, row: Row | None = None) -> None:
        super().reset(row)
        self.questions = row["questions"] if row else []

    def step(self, response: str, ground_truth: dict[str, Any]) -> StepResult:
        paid = float(response == ground_truth["answers"][self.current_turn]) / SUMS
        self.current_turn += 1
        done = self.current_turn == SUMS
        return StepResult(paid, None if done else self.questions[self.current_turn], done)


def load(data: Any, seed: int, **config: Any) -> Splits:
    """Different lists of sums, the first ones held out; every sum of two digits occurs in both splits."""
    rng = random.Random(f"sums {seed}")
    pairs = [(a, b) for a in range(10) for b in range(10)]
    rows = [_row(number, rng.sample(pairs, SUMS)) for number in range(data.synthetic_train_rows + data.synthetic_test_rows)]
    return Splits(train=rows[data.synthetic_test_rows :], test=rows[: data.synthetic_test_rows])


def _row(number: int, pairs: list[tuple[int, int]]) -> Row:
    questions = [f"{a}+{b}" for a, b in pairs]
    return {
        "id": f"{number}",
        "prompt": [{"role": "user", "content": questions[0]}],
        "questions": questions,
        "ground_truth": {"answers": [str(a + b) for a, b in pairs]},
    }


def score(trajectory: Trajectory, row: Row) -> float:
    """1.0 if all six answers are right."""
    return float([turn.text for turn in trajectory.turns] == gold(row))


def gold(row: Row) -> list[str]:
    a_and_b = (question.split("+") for question in row["questions"])
    return [str(int(a) + int(b)) for a, b in a_and_b]


def demonstrate(row: Row, rng: random.Random) -> Recital:
    """Now and then it says another number."""

    def said() -> Iterator[str]:
        for answer in gold(row):
            yield answer if rng.random() < RIGHT else str(rng.randrange(19))

    return Recital(list(said()))


FAMILY = Family("sums", SumsEnv, load, score, demonstrate, gold=gold, config_keys=("calculator",))
