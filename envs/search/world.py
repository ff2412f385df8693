"""Small worlds of facts, drawn anew for every row, and questions that take two of them to answer."""

from __future__ import annotations

import random
from dataclasses import dataclass
from hashlib import sha256

HELD_OUT = 8
"""One chain of this many is held out."""
PEOPLE = 4
CITIES = 4
"""So many of each in a world."""
SUBJECTS = 2
"""Kinds of things that its cities have."""


def _words(text: str) -> list[str]:
    return text.split()


PERSONS = _words("ada ben cleo dora egon finn gina hugo ida jon kira leo mara nils olga pia")
PLACES = _words("bari bonn cork ghent graz kiel lima lyon oslo pisa porto riga rome turku vigo zug")
RELATIONS = {"born": "{person} was born in {city}.", "works": "{person} works in {city}."}
"""Relation -> the sentence of a passage."""
KINDS = {
    "bird": _words("crow duck eagle finch hawk heron owl raven robin stork swan wren"),
    "fruit": _words("apple date fig grape kiwi lemon lime mango melon peach pear plum"),
    "metal": _words("brass chrome cobalt copper gold iron lead nickel silver steel tin zinc"),
    "tree": _words("alder ash beech birch cedar elm fir holly larch maple oak pine"),
}
"""What a city has -> what it may be. Every word of these lists is in one of them only."""
HAS = "The {kind} of {city} is the {value}."
QUESTIONS = {
    "born": "Which {kind} does the city have in which {person} was born?",
    "works": "Which {kind} does the city have in which {person} works?",
}


@dataclass(frozen=True)
class Chain:
    """Two facts, the second about what the first one leads to, and the question that asks for the end."""

    person: str
    relation: str
    city: str
    kind: str
    value: str

    @property
    def key(self) -> str:
        """Names the chain."""
        return f"{self.person} {self.relation} {self.city} {self.kind} {self.value}"

    @property
    def terse(self) -> str:
        """The question in a few words. The first one is always the same: only words after a space are one token."""
        return f"find {self.kind} where {self.person} {self.relation}"

    @property
    def question(self) -> str:
        return QUESTIONS[self.relation].format(kind=self.kind, person=self.person.capitalize())

    @property
    def queries(self) -> tuple[str, str]:
        """What finds the first fact, and then the second."""
        return f"{self.person} {self.relation}", f"{self.city} {self.kind}"


@dataclass(frozen=True)
class World:
    """Who was born and works where, and what the cities have."""

    homes: dict[tuple[str, str], str]
    """(person, relation) -> city"""
    things: dict[tuple[str, str], str]
    """(city, kind) -> value; within a world, no value occurs twice"""

    def chains(self) -> list[Chain]:
        """All questions that this world answers."""
        return [
            Chain(person, relation, city, kind, value)
            for (person, relation), city in self.homes.items()
            for (place, kind), value in self.things.items()
            if place == city
        ]

    def passages(self, terse: bool) -> list[tuple[str, str]]:
        """(title, text) of every fact: a few words, or a sentence."""
        homes = [(person, self._home(person, relation, city, terse)) for (person, relation), city in self.homes.items()]
        things = [(city, self._thing(city, kind, value, terse)) for (city, kind), value in self.things.items()]
        return [(title if terse else title.capitalize(), text) for title, text in homes + things]

    def _home(self, person: str, relation: str, city: str, terse: bool) -> str:
        if terse:
            return f"{person} {relation} {city}"
        return RELATIONS[relation].format(person=person.capitalize(), city=city.capitalize())

    def _thing(self, city: str, kind: str, value: str, terse: bool) -> str:
        return f"{city} {kind} {value}" if terse else HAS.format(city=city.capitalize(), kind=kind, value=value)


def is_held_out(key: str) -> bool:
    """Whether a chain belongs to the test split: a property of the chain, whatever the seed."""
    return sha256(key.encode()).digest()[0] % HELD_OUT == 0


def draw(rng: random.Random) -> World:
    """A random world. Nobody works where he was born, and the order of its facts says nothing."""
    cities = rng.sample(PLACES, CITIES)
    homes = {}
    for person in rng.sample(PERSONS, PEOPLE):
        for relation, city in zip(RELATIONS, rng.sample(cities, len(RELATIONS)), strict=True):
            homes[person, relation] = city
    things = {}
    for kind in rng.sample(list(KINDS), SUBJECTS):
        for city, value in zip(cities, rng.sample(KINDS[kind], CITIES), strict=True):
            things[city, kind] = value
    return World(_shuffled(homes, rng), _shuffled(things, rng))


def _shuffled(facts: dict[tuple[str, str], str], rng: random.Random) -> dict[tuple[str, str], str]:
    items = list(facts.items())
    rng.shuffle(items)
    return dict(items)
