"""Demonstrations for a row: those of a weak demonstrator for the warm start of the tiny policy, and gold, which checks
the reward.

The weak demonstrator shows every kind of move, but usually answers without a search, which is never right: a policy
cloned from it mostly fails, greedy or sampled. Reinforcement learning then teaches the policy to search for the whole
name, and to answer with the requested fact. The shares below set that starting point.
"""

from __future__ import annotations

import json
import random
import re
from itertools import pairwise

from envs.triviaqa import encyclopaedia
from mtrl.environments.family import Demonstrator
from mtrl.errors import UserError
from mtrl.types import Row

GUESSES = 0.52
"""Share of episodes that answer at once, which is always wrong."""
HALF_SEARCHES = 0.06
"""Share of episodes that search for only one word of the name, and thus read about another place."""
SECOND_SEARCHES = 0.4
"""Share of these episodes that search again, for the whole name; the others answer with a fact that they have read."""
SLIPS = 0.1
"""Share of answers after a search that give a random fact, which is right in a quarter of the cases."""
CALL = '<tool>{"name": "wiki_search", "args": {"query": "'
END_CALL = '"}}</tool>'
"""Text of a call before and after its query; both are single tokens of the tiny policy's tokenizer."""


def search(query: str, reasoning: str = "look it up") -> str:
    """Return the response that calls `wiki_search`."""
    call = json.dumps({"name": "wiki_search", "args": {"query": query}}, ensure_ascii=False)
    return f"<reasoning> {reasoning}</reasoning><tool>{call}</tool>"


def answer(text: str, reasoning: str) -> str:
    """Return the response that ends the episode. With a space before it, a word is the same token as in results."""
    return f"<reasoning> {reasoning}</reasoning><answer> {text}</answer>"


class WeakPlayer:
    """Runs one episode of one training row."""

    def __init__(self, row: Row, rng: random.Random):
        self.place, self.kind, self.rng = row["place"], row["kind"], rng
        habit = rng.random()
        self.queries = [f" {self.place}"]
        if habit < GUESSES:
            self.queries = []
        elif habit < GUESSES + HALF_SEARCHES:
            half = f" {rng.choice(self.place.split())}"
            self.queries = [half, *self.queries] if rng.random() < SECOND_SEARCHES else [half]

    def act(self, observation: str | None) -> str:
        """Return the next response."""
        if self.queries:
            return search(self.queries.pop(0))
        if observation is None:
            return answer(self._guess(), "i know it")
        kind = self.rng.choice(list(encyclopaedia.FACTS)) if self.rng.random() < SLIPS else self.kind
        value = _read(observation, kind)
        return answer(value, f"{kind} {value}") if value else answer(self._guess(), "i know it")

    def _guess(self) -> str:
        """Return a word of the question, which is never right and reveals no possible answers."""
        return self.rng.choice(self.place.split())


def demonstrate(row: Row, rng: random.Random) -> Demonstrator:
    """Return a weak demonstrator for `row`, which must be a generated training row."""
    if row.get("split") == "test":
        raise ValueError(f"row {row['id']} is held out and must not be demonstrated")
    if "place" not in row:
        raise UserError(
            f"row {row['id']} is not a generated one and has no demonstration; set data.path=null, or model=hf"
        )
    return WeakPlayer(row, rng)


def gold(row: Row) -> list[str]:
    """Return the responses of a good player: it searches for the name of the place, or else for the question, and gives
    the first accepted answer."""
    value = row["ground_truth"]["answers"][0]
    if "place" not in row:
        return [search(row["question"]), answer(value, "it says")]
    return [search(f" {row['place']}"), answer(value, f"{row['kind']} {value}")]


def decoys(row: Row) -> list[str]:
    """Return wrong answers of the right kind."""
    values = encyclopaedia.FACTS[row["kind"]] if "kind" in row else ["Paris", "Abraham Lincoln", "1969", "the Nile"]
    accepted = {each.lower() for each in row["ground_truth"]["answers"]}
    return [answer(value, "it says") for value in values if value.lower() not in accepted]


def _read(observation: str, kind: str) -> str | None:
    """Return the word after the kind of fact in the observation; None if it does not occur."""
    words = re.sub(r"</?result>", " ", observation).split()
    return next((value for name, value in pairwise(words) if name == kind), None)
