"""The demonstrator of triviaqa: the content and the success rate of its demonstrations."""

import random
from collections import Counter

import pytest

from envs.triviaqa import FAMILY
from envs.triviaqa.demonstrator import CALL, END_CALL, search
from mtrl.config.model_schema import WarmStartConfig
from mtrl.errors import UserError


def episode(row, rng):
    """The responses of a demonstrator, and their results."""
    player = FAMILY.demonstrate(row, rng)
    environment = FAMILY.environment()
    environment.reset(row)
    responses, results = [], []
    while not results or not results[-1].done:
        responses.append(player.act(results[-1].observation if results else None))
        results.append(environment.step(responses[-1], row["ground_truth"]))
    return responses, results


@pytest.fixture(scope="module")
def episodes(splits):
    rng = random.Random(0)
    return [(row, *episode(row, rng)) for row in splits.train[:1500]]


def test_success_reaches_the_band_of_the_warm_start_and_leaves_something_to_learn(episodes, score):
    won = [score(responses, row) for row, responses, _ in episodes]
    assert WarmStartConfig.success_band[0] < sum(won) / len(won) < 0.6
    rewards = [sum(result.reward for result in results) for *_, results in episodes]
    assert [p > 0.999 for p in rewards] == [w == 1.0 for w in won], "no lucky guesses"


def test_most_episodes_answer_without_a_search(episodes):
    """Greedy decoding of a clone gives the most frequent first move, which is never right."""
    firsts = Counter("<answer>" in responses[0] for _, responses, _ in episodes)
    assert 0.5 < firsts[True] / firsts.total() < 0.6
    assert not any(results[0].components["exact_match"] for *_, results in episodes)


def test_demonstrations_contain_every_needed_move(episodes):
    searches = Counter(sum(CALL in text for text in responses) for _, responses, _ in episodes)
    assert searches[1] > 300 and searches[2] > 30 and not searches[3]
    assert not any(result.metrics["malformed"] + result.metrics["tool_errors"] for *_, r in episodes for result in r)


def test_a_call_is_a_few_tokens_and_its_query():
    assert search(" amber harbor") == f"<reasoning> look it up</reasoning>{CALL} amber harbor{END_CALL}"
    assert {CALL, END_CALL} <= set(FAMILY.tokens)


def test_the_same_seed_gives_the_same_demonstrations(splits):
    for row in splits.train[:20]:
        assert episode(row, random.Random(5)) == episode(row, random.Random(5))


def test_held_out_and_loaded_rows_are_not_demonstrated(splits, make_row):
    with pytest.raises(ValueError, match="held out"):
        FAMILY.demonstrate(splits.test[0], random.Random(0))
    with pytest.raises(UserError, match="row row is not a generated one and has no demonstration"):
        FAMILY.demonstrate(make_row(["x"]), random.Random(0))
