"""The demonstrator of gsm8k: it has a low success rate, shows every skill, and refuses held-out rows."""

import random
from collections import Counter

import pytest

from envs.gsm8k import FAMILY
from mtrl.config.schema import DataConfig


@pytest.fixture(scope="module")
def splits():
    return FAMILY.load(DataConfig(), seed=0, calculator=True)


def test_success_is_low_and_not_zero(splits, play):
    rng = random.Random(0)
    trajectories = [
        (play(row, FAMILY.demonstrate(row, rng).act, max_turns=4, calculator=True), row) for row in splits.train[:1000]
    ]
    success = sum(FAMILY.score(trajectory, row) for trajectory, row in trajectories) / len(trajectories)
    assert 0.10 < success < 0.40
    assert all(turn.text.startswith(("<calc>", "####")) for trajectory, _ in trajectories for turn in trajectory.turns)


def test_most_episodes_guess_wrong(splits):
    """The most frequent first move, which is the greedy one of a clone, must not be right."""
    rng, moves = random.Random(0), Counter()
    for row in splits.train[:1000]:
        move = FAMILY.demonstrate(row, rng).act(None)
        right = move == FAMILY.gold(row)[0]
        moves["right" if right else "guess" if move.startswith("####") else "wrong calc"] += 1
        assert move != f"#### {row['ground_truth']['answer']}", "a lucky guess would teach mental arithmetic"
    assert moves["guess"] > moves["right"] + moves["wrong calc"]
    assert moves["right"] > 50


def recording(player, observations):
    def act(observation):
        observations.append(observation)
        return player.act(observation)

    return act


def test_answers_equal_the_computed_value(splits, play):
    rng = random.Random(0)
    copied = []
    for row in splits.train[:500]:
        observations = []
        act = recording(FAMILY.demonstrate(row, rng), observations)
        trajectory = play(row, act, max_turns=4, calculator=True)
        pairs = zip(trajectory.turns, trajectory.turns[1:], observations[1:], strict=False)
        copied += [after.text == f"#### {value}" for turn, after, value in pairs if turn.text.startswith("<calc>")]
    assert sum(copied) / len(copied) > 0.95


def test_without_the_calculator_it_only_guesses_and_is_sometimes_right(play):
    rows = FAMILY.load(DataConfig(synthetic_train_rows=500), seed=0).train
    rng = random.Random(0)
    first = [FAMILY.demonstrate(row, rng).act(None) == FAMILY.gold(row)[0] for row in rows]
    assert 0.1 < sum(first) / len(first) < 0.3


def test_held_out_rows_are_refused(splits):
    with pytest.raises(ValueError, match="held out"):
        FAMILY.demonstrate(splits.test[0], random.Random(0))


def test_real_rows_have_demonstrations(row):
    assert FAMILY.demonstrate(row, random.Random(0)).act(None).startswith("#### ")
