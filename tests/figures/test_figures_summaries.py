"""Numbers of episodes, on worked examples."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtrl.figures.episodes import episode_of
from mtrl.figures.summaries import TURNS, by_turn, cells, quantiles, shares
from mtrl.scoring.agreement import Thresholds
from tests.figures.made import trajectory, turn


def episode(*turns, step=1, score=1.0):
    return episode_of("train", step, trajectory(turns, score=score), Thresholds())


def components(turn):
    return turn.components


def test_means_by_turn_are_over_the_episodes_that_have_the_turn():
    long = episode(turn(components={"a": 1.0}), turn(components={"a": 3.0, "b": -1.0}))
    short = episode(turn(components={"a": 2.0}))
    found = by_turn([long, short], components)
    assert found.names == ["a", "b"] and found.counts == [2, 1]
    np.testing.assert_array_equal(found.means, [[1.5, 3.0], [np.nan, -1.0]])


def test_a_component_that_a_turn_does_not_report_is_zero():
    found = by_turn([episode(turn(components={"a": 1.0})), episode(turn())], components)
    assert found.means.tolist() == [[1.0]] and found.per_turn.tolist() == [[0.5]]


def test_no_episodes_have_no_turns():
    found = by_turn([], components)
    assert found.names == [] and found.counts == [] and found.per_turn.shape == (0, 0)


def test_turns_beyond_the_last_place_are_left_out():
    found = by_turn([episode(*[turn(components={"a": 1.0})] * (TURNS + 5))], components)
    assert len(found.counts) == TURNS == found.means.shape[1]


@settings(deadline=None, max_examples=60)
@given(st.lists(st.lists(st.floats(-100, 100), min_size=1, max_size=6), min_size=1, max_size=20))
def test_components_by_turn_add_up_to_the_reward(rewards):
    episodes = [episode(*[turn(components={"a": value}) for value in some]) for some in rewards]
    found = by_turn(episodes, components)
    assert np.dot(found.per_turn[0], found.counts) == pytest.approx(sum(map(sum, rewards)), abs=1e-6)


def test_quantiles_are_linear_between_values():
    found = quantiles([(3, float(v)) for v in range(101)] + [(1, 7.0)])
    assert found.places == [1, 3] and found.counts == [1, 101]
    assert found.values.tolist() == [[7.0] * 5, [5.0, 25.0, 50.0, 75.0, 95.0]]
    assert not quantiles([])


def test_few_values_stay_at_their_positions():
    episodes = [
        episode(turn(reward=reward), score=score) for reward, score in [(1, 1), (1, 1), (0.2, 0), (1, 0), (0, 1)]
    ]
    found = [(cell.score, cell.reward, cell.count, cell.verdict) for cell in cells(episodes)]
    assert found == [(0, 0.2, 1, "agree"), (0, 1, 1, "lenient"), (1, 0, 1, "strict"), (1, 1, 2, "agree")]


def test_episodes_without_a_score_are_not_counted():
    assert cells([episode(turn(), score=None)]) == []


@settings(deadline=None, max_examples=60)
@given(st.lists(st.floats(-5, 5), min_size=1, max_size=300))
def test_many_values_are_counted_on_a_grid(rewards):
    found = cells([episode(turn(reward=reward)) for reward in rewards], bins=8)
    assert sum(cell.count for cell in found) == len(rewards)
    assert len({cell.reward for cell in found}) <= 8
    assert all(min(rewards) <= cell.reward <= max(rewards) for cell in found)


def test_shares_are_by_step():
    episodes = [episode(turn(reward=r), step=s) for s, r in [(2, 1.0), (1, 0.0), (2, 0.0)]]
    assert shares(episodes, lambda e: float(e.claimed)) == {1: 0.0, 2: 0.5}
