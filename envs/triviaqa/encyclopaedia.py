"""A small made-up encyclopaedia: an article for every place, the same in every run, as Wikipedia would be.

A place has a name of two words, each of which it shares with others: who searches for one of them alone reads about
another place. What an article states is drawn by a hash of the name, so no place's facts follow from another's.
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
"""Kind of fact -> what it may be."""


def places() -> list[str]:
    """Every place that there is."""
    return [f"{first} {second}" for first in FIRST for second in SECOND]


def fact(place: str, kind: str) -> str:
    """What the encyclopaedia says about a place."""
    values = FACTS[kind]
    return values[int.from_bytes(sha256(f"{kind} of {place}".encode()).digest()[:8], "big") % len(values)]


def question(place: str, kind: str) -> str:
    """With a space before the kind, it is the same token as in the article: a tiny model can find it there."""
    return f"which {kind} has {place} ?"


@lru_cache(maxsize=1)
def articles() -> tuple[Passage, ...]:
    """The corpus."""
    return tuple(
        Passage(str(number), place, " ".join(f"{kind} {fact(place, kind)}" for kind in FACTS))
        for number, place in enumerate(places())
    )
