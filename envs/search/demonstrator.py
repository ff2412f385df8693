"""Demonstrations for a row: those of a weak demonstrator for the warm start of the tiny policy, gold, and wrong
answers.

The weak demonstrator shows every kind of move, but usually guesses at once: a policy cloned from it is mostly wrong,
greedy or sampled. Reinforcement learning then teaches the policy to search twice, and to use the results. The shares
below set that starting point.
"""

from __future__ import annotations

import random

from envs.search.world import KINDS, PLACES, RELATIONS, Chain
from mtrl.environments.family import Recital
from mtrl.types import Row

GUESS_SHARE = 0.52
"""Share of episodes that answer without a search."""
HALF_SHARE = 0.04
"""Share of episodes that search once and then guess."""
SLIP_SHARE = 0.06
"""Share of the other episodes with a mistake: another relation, another place or another answer."""


def demonstrate(row: Row, rng: random.Random) -> Recital:
    """Return a weak demonstrator for `row`, which must be a training row."""
    if row.get("split") == "test":
        raise ValueError(f"row {row['id']} is held out and must not be demonstrated")
    if "chain" in row:
        return Recital(_weak_moves(Chain(**row["chain"]), rng))
    guesses = rng.random() < GUESS_SHARE
    return Recital([_answer(rng.choice(row["question"].split()))] if guesses else gold(row))


def gold(row: Row) -> list[str]:
    """Return the responses of a perfect player."""
    queries = Chain(**row["chain"]).queries if "chain" in row else [row["question"][:400]]
    return [*map(_search, queries), _answer(row["ground_truth"]["target"][0])]


def decoys(row: Row) -> list[str]:
    """Return wrong answers that look right: the values of other cities in this world. Real questions have none."""
    if "chain" not in row:
        return []
    chain = Chain(**row["chain"])
    last_words = {text.rstrip(".").split()[-1] for _, text in row["ground_truth"]["passages"]}
    return [_answer(value) for value in KINDS[chain.kind] if value in last_words and value != chain.value]


def _weak_moves(chain: Chain, rng: random.Random) -> list[str]:
    first, second = chain.queries
    habit = rng.random()
    if habit < GUESS_SHARE:
        return [_answer(rng.choice(KINDS[chain.kind]))]
    if habit < GUESS_SHARE + HALF_SHARE:
        return [_search(first), _answer(rng.choice(KINDS[chain.kind]))]
    if rng.random() >= SLIP_SHARE:
        return [_search(first), _search(second), _answer(chain.value)]
    slip = rng.choice(["relation", "place", "answer"])
    if slip == "relation":
        first = f"{chain.person} {rng.choice(list(RELATIONS))}"
    elif slip == "place":
        second = f"{rng.choice(PLACES)} {chain.kind}"
    value = rng.choice(KINDS[chain.kind]) if slip != "relation" else chain.value
    return [_search(first), _search(second), _answer(value)]


# With a space before it, a word is the same token as in observations.


def _search(query: str) -> str:
    return f"<search> {query}</search>"


def _answer(text: str) -> str:
    return f"<answer> {text}</answer>"
