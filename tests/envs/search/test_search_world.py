"""The generated worlds: their content, and the necessity of two searches."""

import random

import pytest

from envs.search import FAMILY
from envs.search import world as words
from envs.search.world import Chain, draw
from mtrl.retrieval import Passage, make_retriever

WORLDS = [draw(random.Random(seed)) for seed in range(200)]


def retriever_of(world, terse=True):
    passages = [Passage(str(n), title, text) for n, (title, text) in enumerate(world.passages(terse))]
    return make_retriever("bm25", passages)


def test_every_word_is_in_one_list_only():
    lists = [words.PERSONS, words.PLACES, list(words.RELATIONS), list(words.KINDS), *words.KINDS.values()]
    every = [word for each in lists for word in each]
    assert len(set(every)) == len(every) and all(word.isalpha() and word.islower() for word in every)


@pytest.mark.parametrize("world", WORLDS[:20])
def test_a_world_is_complete(world):
    assert (
        len(world.homes) == words.PEOPLE * len(words.RELATIONS) and len(world.things) == words.CITIES * words.SUBJECTS
    )
    assert len(set(world.things.values())) == len(world.things), "a value names its city"
    for person in {person for person, _ in world.homes}:
        assert len({world.homes[person, relation] for relation in words.RELATIONS}) == 2
    chains = world.chains()
    assert len({chain.key for chain in chains}) == len(chains) == len(world.homes) * words.SUBJECTS


@pytest.mark.parametrize("terse", [True, False])
def test_two_searches_find_every_answer(terse):
    for world in WORLDS[:50]:
        retriever = retriever_of(world, terse)
        for chain in world.chains():
            (first,), (second,) = (retriever.search([query], 1)[0] for query in chain.queries)
            assert chain.city in first.passage.text.lower() and chain.person in first.passage.text.lower()
            assert chain.value in second.passage.text and chain.city in second.passage.text.lower()


def test_the_question_does_not_find_the_answer():
    """One search for the question's words finds the right value no more often than chance, and does not identify it."""
    shown = []
    for world in WORLDS:
        retriever = retriever_of(world)
        for chain in world.chains():
            hits = retriever.search([f"{chain.kind} {chain.person} {chain.relation}"], 2)[0]
            shown.append(any(chain.value in hit.passage.text for hit in hits))
            assert not any(chain.value in h.passage.text and chain.person in h.passage.text for h in hits)
    assert sum(shown) / len(shown) < 0.5


def test_the_answer_is_not_in_the_question():
    for chain in WORLDS[0].chains():
        assert chain.value not in chain.terse and chain.value not in chain.question
        assert chain.city not in chain.terse.split() and chain.city not in chain.question.lower().split()


def test_sentences():
    chain = Chain("mara", "works", "rome", "metal", "tin")
    assert chain.question == "Which metal does the city have in which Mara works?"
    world = words.World({("mara", "works"): "rome"}, {("rome", "metal"): "tin"})
    assert world.chains() == [chain]
    assert world.passages(terse=False) == [("Mara", "Mara works in Rome."), ("Rome", "The metal of Rome is the tin.")]
    assert world.passages(terse=True) == [("mara", "mara works rome"), ("rome", "rome metal tin")]


def test_answers_cannot_be_guessed(splits):
    """Without a search only the kind of the value is known: all values are about equally frequent."""
    counts = {}
    for row in splits.train + splits.test:
        chain = row["chain"]
        counts.setdefault(chain["person"], {}).setdefault(chain["value"], []).append(row)
    by_value = {}
    for row in splits.train + splits.test:
        by_value[row["chain"]["value"]] = by_value.get(row["chain"]["value"], 0) + 1
    assert len(by_value) == 48 and max(by_value.values()) < 3 * min(by_value.values())


def test_training_rows_do_not_answer_held_out_questions(splits):
    """The most frequent training answer to the same question is right for a held-out row as often as chance."""
    seen = {}
    for row in splits.train:
        answers = seen.setdefault(row["prompt"][0]["content"], {})
        answers[row["ground_truth"]["target"][0]] = answers.get(row["ground_truth"]["target"][0], 0) + 1
    right = [
        max(seen[words], key=seen[words].get) == row["ground_truth"]["target"][0]
        for row in splits.test
        if (words := row["prompt"][0]["content"]) in seen
    ]
    assert len(right) > 200 and sum(right) / len(right) < 0.15
    assert FAMILY.gold(splits.test[0])
