"""MT-GRPO's task for a policy that hardly ever searches: it has to find by its rewards that searching pays."""

from __future__ import annotations

import random
from dataclasses import replace

from envs.triviaqa import FAMILY as TRIVIAQA
from envs.triviaqa.demonstrator import answer
from envs.triviaqa.demonstrator import demonstrate as demonstrate_triviaqa
from mtrl.environments.family import Demonstrator, Recital
from mtrl.types import Row

GUESSES = 0.9
"""Share of episodes that answer at once, and wrongly, where the demonstrator of `triviaqa` might have searched."""


def demonstrate(row: Row, rng: random.Random) -> Demonstrator:
    """A weak player of `row`, which must be a generated training row; one of eight of its episodes succeeds."""
    player = demonstrate_triviaqa(row, rng)
    if rng.random() < GUESSES:
        return Recital([answer(rng.choice(row["place"].split()), "i know it")])
    return player


FAMILY = replace(TRIVIAQA, name="rare_search", demonstrate=demonstrate)
