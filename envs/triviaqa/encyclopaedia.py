"""A small synthetic encyclopaedia: an article for every place, the same in every run, like Wikipedia.

The name of a place has two words, each of which it shares with other places, so that a search for only one of them
finds another place. The facts of an article follow from a hash of the name, so that no place's facts can be inferred
from another's.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import sha256

from mtrl.retrieval import Passage

FIRST, SECOND, RIVERS, MAYORS, EXPORTS, FEASTS = (
    words.split()
    for words in (
        "amber arctic autumn azure bitter bronze cedar copper coral crimson crystal distant dusty eagle ember fallow "
        "gentle golden granite hidden hollow ivory jagged lonely lower marble misty mossy northern purple quiet ruby "
        "scarlet silver timber upper",
        "abbey basin bay bluff bridge canyon castle cliff corner cove creek crossing dale falls ferry field ford "
        "forest gate glen grove harbor haven heights hill hollows junction landing meadow mill point ridge springs "
        "valley wells woods",
        "avon boyne cher dvina ebro garonne humber isar jordan kama loire mosel niger oder tigris rhone",
        "abbott becker chavez duarte egan fuchs gupta hansen iqbal jensen keller lopez moreno novak okafor quinn",
        "barley cement dyes flax glass hemp iron jute leather oil paper rope salt sugar tea wool",
        "april august diwali easter equinox friday june lent march monday october purim sunday thursday july yule",
    )
)
FACTS = {"river": RIVERS, "mayor": MAYORS, "export": EXPORTS, "feast": FEASTS}
"""Possible values of each kind of fact."""


def places() -> list[str]:
    """Return the names of all places."""
    return [f"{first} {second}" for first in FIRST for second in SECOND]


def fact(place: str, kind: str) -> str:
    """Return the fact of this kind about a place."""
    values = FACTS[kind]
    return values[int.from_bytes(sha256(f"{kind} of {place}".encode()).digest()[:8], "big") % len(values)]


def question(place: str, kind: str) -> str:
    """Return the question. With a space before it, the kind is the same token as in the article, so that a tiny model
    can find it there."""
    return f"which {kind} has {place} ?"


@lru_cache(maxsize=1)
def articles() -> tuple[Passage, ...]:
    """Return the corpus."""
    return tuple(
        Passage(str(number), place, " ".join(f"{kind} {fact(place, kind)}" for kind in FACTS))
        for number, place in enumerate(places())
    )
