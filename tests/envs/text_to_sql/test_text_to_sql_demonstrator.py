"""The demonstrator of text_to_sql: the content and the success rate of its demonstrations."""

import random
from collections import Counter

import pytest

from envs.text_to_sql import FAMILY
from mtrl.config.model_schema import WarmStartConfig

pytestmark = pytest.mark.xdist_group("demonstrations of text_to_sql")  # which share 500 episodes


@pytest.fixture(scope="module")
def episodes(splits):
    return [
        (row, FAMILY.demonstrate(row, random.Random(index)).responses) for index, row in enumerate(splits.train[:500])
    ]


def test_success_reaches_the_band_of_the_warm_start_and_leaves_something_to_learn(episodes, reward_of):
    """Fewer than half of the demonstrations are right, and none by its most frequent behaviour."""
    rate = sum(reward_of(row, responses) == 1.0 for row, responses in episodes) / len(episodes)
    assert WarmStartConfig.success_band[0] < rate < 0.6


def test_most_episodes_guess_and_guesses_are_never_right(episodes, reward_of):
    guesses = [(row, responses) for row, responses in episodes if len(responses) == 1]
    assert len(guesses) > len(episodes) / 2
    assert all(reward_of(row, responses) == 0.0 for row, responses in guesses)
    firsts = Counter(responses[0].partition(">")[0] for _, responses in episodes)
    assert firsts.most_common(1)[0][0] == "<solution"


def test_no_turn_is_malformed_and_every_query_runs(episodes, play):
    for row, responses in episodes:
        results = play(row, responses)
        assert results[-1].done and len(results) == len(responses)
        assert sum(result.metrics["malformed"] + result.metrics["query_errors"] for result in results) == 0


def test_act_follows_the_episode_and_repeats_with_the_seed(splits):
    row = splits.train[0]
    player, again = (FAMILY.demonstrate(row, random.Random(5)) for _ in range(2))
    acted = [player.act(None), *(player.act("seen") for _ in player.responses[1:])]
    assert acted == player.responses == again.responses
    assert player.act("more") == player.responses[-1]


def test_held_out_rows_are_not_demonstrated(splits):
    with pytest.raises(ValueError, match="held out"):
        FAMILY.demonstrate(splits.test[0], random.Random(0))


def test_decoys_are_wrong_and_well_formed(splits, play, reward_of):
    for row in splits.train[:8]:
        decoys = FAMILY.decoys(row)
        for decoy in decoys:
            assert reward_of(row, [decoy]) == 0.0 and play(row, [decoy])[0].metrics["malformed"] == 0.0, decoy
            assert reward_of(row, [decoy], reward="skyrl") == 0.0, "in the right format"
        assert len(set(decoys)) >= 3
