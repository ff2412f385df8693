"""Tests of the estimators that use the whole batch, against naive loops over tokens."""

import statistics

import pytest
from groups import batch_advantages, flat, groups, make_group
from hypothesis import given, settings
from hypothesis import strategies as st

from mtrl.algorithms.advantages import turn_advantages
from mtrl.config.algorithm_schema import AlgorithmConfig


def whitened(values, tokens):
    """Whiten the values of turns with these numbers of tokens, token by token."""
    every = [value for value, count in zip(values, tokens, strict=True) for _ in range(count)]
    if len(every) < 2 or max(every) - min(every) < 1e-9:
        return [0.0] * len(values)
    mean, variance = statistics.mean(every), statistics.variance(every)
    return [
        (value - mean) / (variance + 1e-8) ** 0.5 if count else 0.0 for value, count in zip(values, tokens, strict=True)
    ]


@st.composite
def batches(draw):
    batch = draw(groups)
    return batch, [[[draw(st.integers(0, 3)) for _ in turns] for turns in group] for group in batch]


def assert_whitened(batch, method, credit, gamma, values):
    rewards, tokens = batch
    config = AlgorithmConfig(advantage_method=method, credit=credit, gamma=gamma)
    assert flat(batch_advantages(rewards, config, tokens)) == pytest.approx(whitened(values, flat(tokens)), abs=1e-6)


@settings(deadline=None)
@given(batch=batches(), gamma=st.sampled_from([1.0, 0.5]))
def test_reinforce_pp_against_its_definition(batch, gamma):
    to_go = []
    for turns in (turns for group in batch[0] for turns in group):
        later, found = 0.0, []
        for r in reversed(turns):
            later = r + gamma * later
            found.insert(0, later)
        to_go += found
    assert_whitened(batch, "reinforce_pp", None, gamma, to_go)
    whole = [sum(turns) for group in batch[0] for turns in group for _ in turns]
    assert_whitened(batch, "reinforce_pp", "trajectory", gamma, whole)


@settings(deadline=None)
@given(batch=batches())
def test_reinforce_pp_baseline_against_its_definition(batch):
    centred, by_turn = [], []
    for group in batch[0]:
        mean = statistics.mean(sum(turns) for turns in group)
        for turns in group:
            centred += [sum(turns) - mean] * len(turns)
            peers = [[sum(other[t:]) for other in group if len(other) > t] for t in range(len(turns))]
            by_turn += [sum(turns[t:]) - statistics.mean(peers[t]) for t in range(len(turns))]
    assert_whitened(batch, "reinforce_pp_baseline", None, 1.0, centred)
    assert_whitened(batch, "reinforce_pp_baseline", "turn", 1.0, by_turn)


# ---- gdpo: components of the reward


def gdpo(*batch, weights=None):
    return turn_advantages(batch, AlgorithmConfig(advantage_method="gdpo"), weights)


def with_parts(*trajectories, tokens=None):
    """Return a group of trajectories; each is given as a list of the components of its turns."""
    rewards = [[sum(parts.values()) for parts in turns] for turns in trajectories]
    return make_group(rewards, tokens, components=trajectories)


def test_gdpo_worked():
    """The components of all trajectories but one cancel in their sum, and gdpo still distinguishes them. Computed by
    hand, with equal lengths."""
    right, tidy = [1.0, 0.0, 1.0, 0.0], [0.0, 1.0, 1.0, 0.0]
    group = with_parts(*([{"right": r, "tidy": t}] for r, t in zip(right, tidy, strict=True)))
    z = 0.5 / (3**-0.5 + 1e-6)  # z-score of 1 in 1, 0, 1, 0
    total = [z * (1 if r else -1) + 0.5 * z * (1 if t else -1) for r, t in zip(right, tidy, strict=True)]
    expected = [value / (statistics.variance(total) + 1e-8) ** 0.5 for value in total]
    assert flat(gdpo(group, weights={"right": 1.0, "tidy": 0.5})) == pytest.approx(expected)
    assert flat(gdpo(group, weights={"right": 1.0, "tidy": 0.5}))[0] > 0 > flat(gdpo(group, weights={"tidy": 1.0}))[0]


@st.composite
def parted(draw):
    value = st.integers(-8, 8).map(lambda n: n / 8)
    parts = st.fixed_dictionaries({"a": value, "b": value})
    shape = st.lists(st.lists(st.lists(parts, min_size=1, max_size=3), min_size=2, max_size=4), min_size=1, max_size=3)
    batch = draw(shape)
    return batch, [[[draw(st.integers(1, 3)) for _ in turns] for turns in group] for group in batch]


@settings(deadline=None)
@given(batch=parted(), weight=st.sampled_from([1.0, 0.25, -2.0]))
def test_gdpo_against_its_definition(batch, weight):
    values = []
    for group in batch[0]:
        total = [0.0] * len(group)
        for name, factor in (("a", 1.0), ("b", weight)):
            sums = [sum(parts[name] for parts in turns) for turns in group]
            if len(set(sums)) > 1:
                mean, std = statistics.mean(sums), statistics.stdev(sums)
                total = [t + factor * (s - mean) / (std + 1e-6) for t, s in zip(total, sums, strict=True)]
        values += [t for t, turns in zip(total, group, strict=True) for _ in turns]
    made = [with_parts(*group, tokens=tokens) for group, tokens in zip(*batch, strict=True)]
    ours = flat(gdpo(*made, weights={"a": 1.0, "b": weight}))
    assert ours == pytest.approx(whitened(values, flat(batch[1])), abs=1e-6)


def test_gdpo_weights_a_component_by_its_weight_and_not_by_its_spread():
    def of(scale):
        return with_parts(*([{"a": scale * a, "b": b}] for a, b in [(1.0, 0.0), (0.0, 1.0), (0.0, 0.5)]))

    weights = {"a": 1.0, "b": 1.0}
    assert flat(gdpo(of(1000.0), weights=weights)) == pytest.approx(flat(gdpo(of(1.0), weights=weights)), abs=1e-4)


def test_gdpo_uses_differences_that_cancel_in_the_reward():
    """Every trajectory has a total reward of 1, so grpo gives no advantage. The weights of gdpo still distinguish the
    trajectories."""
    group = with_parts([{"a": 1.0, "b": 0.0}], [{"a": 0.0, "b": 1.0}], [{"a": 0.0, "b": 1.0}])
    assert set(flat(turn_advantages([group], AlgorithmConfig()))) == {0.0}
    assert len(set(flat(gdpo(group, weights={"a": 1.0, "b": 0.5})))) == 2


def test_gdpo_without_components_uses_the_reward():
    """A composition that changes no reward stores no components."""
    plain = make_group([[1.0, 0.5], [0.0], [0.25]])
    with_components = with_parts(
        [{"environment": 1.0}, {"environment": 0.5}], [{"environment": 0.0}], [{"environment": 0.25}]
    )
    assert (
        gdpo(plain) == gdpo(plain, weights={"environment": 1.0}) == gdpo(with_components, weights={"environment": 1.0})
    )
    assert any(flat(gdpo(plain)))
    assert set(flat(gdpo(plain, weights={"never reported": 1.0}))) == {0.0}
