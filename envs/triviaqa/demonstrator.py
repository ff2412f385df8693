"""Players of a row: a weak one for the warm start of the tiny policy, and a perfect one to check rewards with.

The weak player shows how every move is made, but its habit is to answer without looking, which is never right: a policy
cloned from it mostly fails, greedy or sampled. What reinforcement learning adds is to search, by the whole name, and to
answer with what was asked. The shares below set that starting point.
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
"""Share of episodes that answer at once, and wrongly."""
HALF_SEARCHES = 0.06
"""Share that search for one word of the name, and so read about another place."""
SECOND_SEARCHES = 0.4
"""Share of those that search again, by the whole name; the others answer with what they have read."""
SLIPS = 0.1
"""Share of the answers after a search that give a fact at random, which is the right one in a quarter of them."""
CALL = '<tool>{"name": "wiki_search", "args": {"query": "'
END_CALL = '"}}</tool>'
"""A call around its query; the tiny policy's tokenizer keeps both whole."""


def search(query: str, reasoning: str = "look it up") -> str:
    """The response that calls `wiki_search`."""
    call = json.dumps({"name": "wiki_search", "args": {"query": query}}, ensure_ascii=False)
    return f"<reasoning> {reasoning}</reasoning><tool>{call}</tool>"


def answer(text: str, reasoning: str) -> str:
    """The response that ends the episode. The space makes a word the same token as in results."""
    return f"<reasoning> {reasoning}</reasoning><answer> {text}</answer>"


class WeakPlayer:
    """Plays one episode of one training row."""

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
        """The next response."""
        if self.queries:
            return search(self.queries.pop(0))
        if observation is None:
            return answer(self._guess(), "i know it")
        kind = self.rng.choice(list(encyclopaedia.FACTS)) if self.rng.random() < SLIPS else self.kind
        value = _read(observation, kind)
        return answer(value, f"{kind} {value}") if value else answer(self._guess(), "i know it")

    def _guess(self) -> str:
        """A word of the question, never right: it says nothing about what answers there are."""
        return self.rng.choice(self.place.split())


def demonstrate(row: Row, rng: random.Random) -> Demonstrator:
    """A weak player of `row`, which must be a generated training row."""
    if row.get("split") == "test":
        raise ValueError(f"row {row['id']} is held out and must not be demonstrated")
    if "place" not in row:
        raise UserError(
            f"row {row['id']} is not a generated one and has no demonstration; set data.path=null, or model=hf"
        )
    return WeakPlayer(row, rng)


def gold(row: Row) -> list[str]:
    """A good player: it searches, by the name of the place or else by the question, and gives the first answer."""
    value = row["ground_truth"]["answers"][0]
    if "place" not in row:
        return [search(row["question"]), answer(value, "it says")]
    return [search(f" {row['place']}"), answer(value, f"{row['kind']} {value}")]


def decoys(row: Row) -> list[str]:
    """Wrong answers of the right kind."""
    values = encyclopaedia.FACTS[row["kind"]] if "kind" in row else ["Paris", "Abraham Lincoln", "1969", "the Nile"]
    accepted = {each.lower() for each in row["ground_truth"]["answers"]}
    return [answer(value, "it says") for value in values if value.lower() not in accepted]


def _read(observation: str, kind: str) -> str | None:
    """The word after the kind of fact."""
    words = re.sub(r"</?result>", " ", observation).split()
    return next((value for name, value in pairwise(words) if name == kind), None)
