"""The demonstrator of search: the content and the success rate of its demonstrations."""

import random
from collections import Counter

import pytest

from envs.search import FAMILY
from mtrl.config.model_schema import WarmStartConfig


def episode(row, rng):
    """The responses of a demonstrator, and their results."""
    player = FAMILY.demonstrate(row, rng)
    environment = FAMILY.environment(max_turns=5)
    environment.reset(row)
    responses, results = [], []
    while not results or not results[-1].done:
        responses.append(player.act(results[-1].observation if results else None))
        results.append(environment.step(responses[-1], row["ground_truth"]))
    return responses, results


@pytest.fixture(scope="module")
def episodes(splits):
    rng = random.Random(0)
    return [(row, *episode(row, rng)) for row in splits.train[:1000]]


def test_success_reaches_the_band_of_the_warm_start_and_leaves_something_to_learn(episodes, score):
    won = [score(responses, row) for row, responses, _ in episodes]
    assert won == [results[-1].reward for *_, results in episodes]
    assert WarmStartConfig.success_band[0] < sum(won) / len(won) < 0.6


def test_most_episodes_guess_at_once_and_fail(episodes):
    """Greedy decoding of a clone gives the most frequent first move, which is an answer."""
    at_once = [results[-1].reward for _, responses, results in episodes if len(responses) == 1]
    assert len(at_once) / len(episodes) > 0.5 and sum(at_once) / len(at_once) < 0.15


def test_demonstrations_contain_every_move_and_none_is_malformed(episodes):
    assert Counter(len(responses) for _, responses, _ in episodes).keys() == {1, 2, 3}
    assert not any(result.metrics["malformed"] for *_, results in episodes for result in results)
    for row, responses, _ in episodes:
        assert responses[-1].startswith("<answer> ") and all(r.startswith("<search> ") for r in responses[:-1])
        assert row["split"] == "train"


def test_the_same_seed_gives_the_same_demonstrations(splits):
    for row in splits.train[:20]:
        assert episode(row, random.Random(5)) == episode(row, random.Random(5))


def test_held_out_rows_are_not_demonstrated(splits):
    with pytest.raises(ValueError, match="held out"):
        FAMILY.demonstrate(splits.test[0], random.Random(0))


def test_real_questions_are_mostly_guessed(score):
    row = {"id": "r", "question": "who won the game?", "ground_truth": {"target": ["the Broncos"]}, "split": "train"}
    rng = random.Random(0)
    episodes = [FAMILY.demonstrate(row, rng).responses for _ in range(200)]
    assert {len(responses) for responses in episodes} == {1, 2}
    won = [score(responses, row) for responses in episodes]
    assert won == [float(responses == FAMILY.gold(row)) for responses in episodes] and 60 < sum(won) < 100
