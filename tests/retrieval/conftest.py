"""Fixtures with a generated corpus and questions about it."""

import random

import pytest

from mtrl.retrieval import Passage

PLACES = ["Altona", "Birka", "Corve", "Dunmere", "Eskholm", "Farrow", "Glenby", "Hollin", "Istra", "Jarlen"]
TRADES = ["weavers", "fishermen", "glassblowers", "smiths", "coopers", "tanners", "printers", "potters"]
RIVERS = ["Aller", "Brede", "Cluny", "Dorn", "Elbe", "Fulda", "Gander", "Havel", "Inn"]


def make_passages(count=120, seed=0):
    rng = random.Random(seed)
    passages = []
    for number in range(count):
        place, trade, river = rng.choice(PLACES), rng.choice(TRADES), rng.choice(RIVERS)
        text = (
            f"{place} lies on the {river}. In {1200 + number} its {trade} built bridge {number * 37 % 1009}, "
            f"and the {rng.choice(TRADES)} paid for it. " + "The bridge still stands. " * rng.randrange(3)
        )
        passages.append(Passage(f"p{number}", f"{place} in {1200 + number}", text))
    return passages


@pytest.fixture(scope="session")
def passages():
    return make_passages()


@pytest.fixture(scope="session")
def questions(passages):
    """One question per passage, which contains the title of the passage."""
    return [f"Who built the bridge of {passage.title}?" for passage in passages]
