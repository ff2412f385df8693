"""MT-GRPO's task for a policy that rarely searches, and has to learn from its rewards that searching is better."""

from __future__ import annotations

import random
from dataclasses import replace

from envs.triviaqa import FAMILY as TRIVIAQA
from envs.triviaqa.demonstrator import answer
from envs.triviaqa.demonstrator import demonstrate as demonstrate_triviaqa
from mtrl.environments.family import Demonstrator, Recital
from mtrl.types import Row

GUESSES = 0.9
"""Share of episodes that answer wrongly without a search; in the others the demonstrator of `triviaqa` may search."""


def demonstrate(row: Row, rng: random.Random) -> Demonstrator:
    """Return a demonstrator for `row`, which must be a generated training row. An eighth of its episodes succeed."""
    player = demonstrate_triviaqa(row, rng)
    if rng.random() < GUESSES:
        return Recital([answer(rng.choice(row["place"].split()), "i know it")])
    return player


FAMILY = replace(TRIVIAQA, name="rare_search", demonstrate=demonstrate)
