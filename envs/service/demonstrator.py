"""A weak demonstrator for the warm start of the tiny policy.

It demonstrates every call and every form, but usually refuses at once, or does what the customer asks for without the
procedure: a policy cloned from it is mostly wrong, greedy or sampled. Reinforcement learning then teaches the policy to
follow the procedure. The shares below set that starting point.
"""

from __future__ import annotations

import random

from envs.service.clerk import END, careful, dismissive, moves_of, obliging, response
from mtrl.environments.family import Recital
from mtrl.types import Row

DISMISSIVE = 0.2
"""Share of episodes that refuse at once."""
OBLIGING = 0.45
"""Share of episodes that carry out the first request, without looking at the order."""
IMPATIENT = 0.005
"""Share of later turns that end the conversation instead of continuing it."""


def demonstrate(row: Row, rng: random.Random) -> Recital:
    """Return a weak demonstrator for `row`, which must be a training row."""
    if row.get("split") == "test":
        raise ValueError(f"row {row['id']} is held out and must not be demonstrated")
    habit = rng.random()
    clerk = dismissive if habit < DISMISSIVE else obliging if habit < DISMISSIVE + OBLIGING else careful
    moves = moves_of(row, clerk)
    kept = next((turn for turn in range(1, len(moves)) if rng.random() < IMPATIENT), len(moves))
    return Recital([response(move) for move in [*moves[:kept], [END]][: len(moves)]])
