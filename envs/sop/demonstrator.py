"""A weak demonstrator for the warm start of the tiny policy.

It demonstrates every call and every form, but usually answers before it has called the tools, and sometimes copies
values incorrectly: a policy cloned from it is mostly wrong, greedy or sampled. Reinforcement learning then teaches the
policy to call the tools, and to use and copy their results. The shares below set that starting point.
"""

from __future__ import annotations

import random

from envs.sop.data import CASES, final_output, gold
from envs.sop.domains import DOMAINS
from mtrl.environments.family import Demonstrator
from mtrl.types import Row

HASTY = 0.55
"""Share of episodes that answer at once."""
IMPATIENT = 0.03
"""Share of later turns that answer instead of continuing the procedure."""
CARELESS = 0.01
"""Share of answer fields from another case, in episodes that complete the procedure."""


class WeakClerk:
    """Runs one episode. A hasty answer is that of another case, drawn at random."""

    def __init__(self, row: Row, rng: random.Random):
        self.row, self.rng = row, rng
        *calls, _ = gold(row)
        self.calls = calls if rng.random() >= HASTY else []
        self.asked = 0

    def act(self, observation: str | None) -> str:
        """Return the next response."""
        if self.asked == len(self.calls):
            return final_output(self._guess(CARELESS if self.calls else 1.0))
        if self.asked and self.rng.random() < IMPATIENT:
            return final_output(self._guess(1.0))
        self.asked += 1
        return self.calls[self.asked - 1]

    def _guess(self, share: float) -> dict[str, str]:
        """Return the right answer with a share of its fields from another case, whose values with digits are left
        blank."""
        domain = DOMAINS[self.row["domain"]]
        other = domain.decide(domain.draw(self.rng, self.rng.choice(CASES)))
        guesses = {name: "" if any(map(str.isdigit, value)) else value for name, value in other.items()}
        truth = self.row["ground_truth"]
        return {name: guesses[name] if self.rng.random() < share else truth[name] for name in truth}


def demonstrate(row: Row, rng: random.Random) -> Demonstrator:
    """Return a weak demonstrator for `row`, which must be a training row."""
    if row.get("split") == "test":
        raise ValueError(f"row {row['id']} is held out and must not be demonstrated")
    return WeakClerk(row, rng)
