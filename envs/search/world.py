"""Small worlds of facts, drawn for every row, and questions that need two facts to answer."""

from __future__ import annotations

import random
from dataclasses import dataclass
from hashlib import sha256

HELD_OUT = 8
"""Number of chains of which one is held out, on average."""
PEOPLE = 4
CITIES = 4
"""Number of people, and of cities, in a world."""
SUBJECTS = 2
"""Number of kinds of things that the cities of a world have."""


def _words(text: str) -> list[str]:
    return text.split()


PERSONS = _words("ada ben cleo dora egon finn gina hugo ida jon kira leo mara nils olga pia")
PLACES = _words("bari bonn cork ghent graz kiel lima lyon oslo pisa porto riga rome turku vigo zug")
RELATIONS = {"born": "{person} was born in {city}.", "works": "{person} works in {city}."}
"""Sentence of a passage, by relation."""
KINDS = {
    "bird": _words("crow duck eagle finch hawk heron owl raven robin stork swan wren"),
    "fruit": _words("apple date fig grape kiwi lemon lime mango melon peach pear plum"),
    "metal": _words("brass chrome cobalt copper gold iron lead nickel silver steel tin zinc"),
    "tree": _words("alder ash beech birch cedar elm fir holly larch maple oak pine"),
}
"""Possible values of each kind of thing that a city has. Every word occurs in only one of these lists."""
HAS = "The {kind} of {city} is the {value}."
QUESTIONS = {
    "born": "Which {kind} does the city have in which {person} was born?",
    "works": "Which {kind} does the city have in which {person} works?",
}


@dataclass(frozen=True)
class Chain:
    """Two facts, the second about the result of the first, and the question for the final value."""

    person: str
    relation: str
    city: str
    kind: str
    value: str

    @property
    def key(self) -> str:
        """Key that identifies the chain."""
        return f"{self.person} {self.relation} {self.city} {self.kind} {self.value}"

    @property
    def terse(self) -> str:
        """The question in a few words. The first word is always the same, because only words after a space are one
        token."""
        return f"find {self.kind} where {self.person} {self.relation}"

    @property
    def question(self) -> str:
        return QUESTIONS[self.relation].format(kind=self.kind, person=self.person.capitalize())

    @property
    def queries(self) -> tuple[str, str]:
        """Queries that find the first fact and then the second."""
        return f"{self.person} {self.relation}", f"{self.city} {self.kind}"


@dataclass(frozen=True)
class World:
    """Birthplaces and workplaces of people, and the things that the cities have."""

    homes: dict[tuple[str, str], str]
    """City by (person, relation)."""
    things: dict[tuple[str, str], str]
    """Value by (city, kind); within a world, no value occurs twice."""

    def chains(self) -> list[Chain]:
        """Return all questions that this world answers."""
        return [
            Chain(person, relation, city, kind, value)
            for (person, relation), city in self.homes.items()
            for (place, kind), value in self.things.items()
            if place == city
        ]

    def passages(self, terse: bool) -> list[tuple[str, str]]:
        """Return (title, text) of every fact: a few words, or a sentence."""
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
    """Whether a chain belongs to the test split. This depends only on the chain, not on the seed."""
    return sha256(key.encode()).digest()[0] % HELD_OUT == 0


def draw(rng: random.Random) -> World:
    """Draw a random world. Birthplace and workplace of a person differ, and the order of the facts carries no
    information."""
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
