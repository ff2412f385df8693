"""A task that a policy of one layer cannot learn: the answer to `d3 a7 a` is the digit after the first `a`.

Attention has to find a token by the token before it, which takes two layers (induction heads). One layer can only learn
that the answer is one of the two digits, so the reward stays at one half without any other fault.
"""

from __future__ import annotations

import random
import string
from typing import Any

from mtrl.datasets import Splits
from mtrl.environments.base import BaseEnvironment, StepResult
from mtrl.environments.family import Family, Recital
from mtrl.types import Row, Trajectory

PAIRS = 2
LOOKS = 0.5
"""Share of the demonstrated answers that are drawn from the digits of the question."""


class LookupEnv(BaseEnvironment):
    """An episode of one turn, whose response is a digit."""

    def step(self, response: str, ground_truth: dict[str, Any]) -> StepResult:
        self.current_turn += 1
        return StepResult(float(response == ground_truth["answer"]), None, True)


def load(data: Any, seed: int, **config: Any) -> Splits:
    """Return distinct questions, of which the first are held out."""
    rng = random.Random(f"lookup {seed}")
    answers: dict[str, str] = {}
    while len(answers) < data.synthetic_train_rows + data.synthetic_test_rows:
        pairs = list(zip(rng.sample(string.ascii_lowercase, PAIRS), rng.sample(string.digits, PAIRS), strict=True))
        asked, answer = rng.choice(pairs)
        answers[" ".join(f"{letter}{digit}" for letter, digit in pairs) + f" {asked}"] = answer
    rows = [_row(number, question, answer) for number, (question, answer) in enumerate(answers.items())]
    return Splits(train=rows[data.synthetic_test_rows :], test=rows[: data.synthetic_test_rows])


def _row(number: int, question: str, answer: str) -> Row:
    prompt = [{"role": "user", "content": question}]
    return {"id": f"{number}", "prompt": prompt, "ground_truth": {"answer": answer}}


def score(trajectory: Trajectory, row: Row) -> float:
    """Return 1.0 if the whole response is the digit."""
    return float([turn.text for turn in trajectory.turns] == [row["ground_truth"]["answer"]])


def demonstrate(row: Row, rng: random.Random) -> Recital:
    """Return a demonstrator that answers with one of the digits of the question, or with any digit."""
    question = row["prompt"][0]["content"]
    seen = [character for character in question if character.isdigit()]
    return Recital([rng.choice(seen if rng.random() < LOOKS else string.digits)])


FAMILY = Family("lookup", LookupEnv, load, score, demonstrate, config_keys=("calculator",))
