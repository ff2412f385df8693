"""The demonstrators of the games: the content and the success rate of their demonstrations."""

import random
from collections import Counter
from itertools import pairwise

import pytest

from envs.games import FAMILY


def episode(row, rng):
    """The responses of a demonstrator, and their results."""
    player = FAMILY.demonstrate(row, rng)
    environment = FAMILY.environment(max_turns=6)
    environment.reset(row)
    responses, results = [], []
    while not results or not results[-1].done:
        responses.append(player.act(results[-1].observation if results else None))
        results.append(environment.step(responses[-1], row["ground_truth"]))
    return responses, results


@pytest.fixture(scope="module")
def episodes(splits):
    rng = random.Random(0)
    return {
        game: [(row, *episode(row, rng)) for row in splits.train[first:2000:2]]
        for first, game in enumerate(("mastermind", "maze"))
    }


@pytest.mark.parametrize("game", ["mastermind", "maze"])
def test_the_success_rate_is_low_and_not_zero(game, episodes, score):
    played = episodes[game]
    won = [score(responses, row) for row, responses, _ in played]
    assert won == [results[-1].reward for *_, results in played]
    assert 0.3 < sum(won) / len(won) < 0.45, "a clone wins about half as often, sampled, and hardly ever, greedy"


@pytest.mark.parametrize("game", ["mastermind", "maze"])
def test_most_episodes_repeat_the_first_move_and_fail(game, episodes):
    """Greedy decoding of a clone gives the most frequent second move, which repeats the first."""
    seconds = Counter(responses[1] == responses[0] for _, responses, _ in episodes[game] if len(responses) > 1)
    assert seconds[True] / seconds.total() > 0.55
    stubborn = [results[-1].reward for _, responses, results in episodes[game] if len(set(responses)) == 1]
    assert sum(stubborn) / len(stubborn) < 0.2


def test_invalid_moves_are_repaired(episodes):
    """The walker makes no invalid moves; the breaker makes few, and shows how to continue."""
    assert not any(result.metrics["malformed"] for *_, results in episodes["maze"] for result in results)
    after = [
        following.metrics["malformed"]
        for *_, results in episodes["mastermind"]
        for result, following in pairwise(results)
        if result.metrics["malformed"]
    ]
    assert len(after) > 10 and sum(after) / len(after) < 0.2


def test_the_same_seed_gives_the_same_demonstrations(splits):
    for row in splits.train[:20]:
        assert episode(row, random.Random(5)) == episode(row, random.Random(5))


def test_held_out_rows_are_not_demonstrated(splits):
    with pytest.raises(ValueError, match="held out"):
        FAMILY.demonstrate(splits.test[0], random.Random(0))
