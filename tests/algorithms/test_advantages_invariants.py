"""Invariants of every registered estimator; exceptions are named here with the reason."""

import math
from dataclasses import replace

import pytest
from groups import CONFIGURATIONS, METHODS, batch_advantages, flat, groups, make_group, make_turn, reward, shape
from hypothesis import given, note, settings
from hypothesis import strategies as st

from mtrl.algorithms.advantages import turn_advantages
from mtrl.config.algorithm_schema import AlgorithmConfig, PassKConfig

WHITENED = {"reinforce_pp", "reinforce_pp_baseline", "gdpo"}
"""Methods that use the whole batch, weighted by tokens."""
BATCHWIDE = {*WHITENED, "gpg"}
WITHOUT_BASELINE = {"monte_carlo", "reinforce_pp"}
"""Methods that compare no group: monte_carlo has no baseline, and reinforce_pp uses the whole batch."""
NOT_SHIFTED = {
    "monte_carlo": "the return is the advantage",
    "maxrl": "it is relative to the mean",
    "gpg": "alpha counts the rewards other than 0",
    "pkpo_sloo": "n and n-1 weigh the reward and its baseline differently",
}

FEW = settings(max_examples=30)
"""For properties of all configurations, each of which gets every example: up to 15 trajectories of several lengths."""


def method_of(label):
    return CONFIGURATIONS[label].advantage_method


def is_sloo(label):
    return label.endswith("pkpo_sloo")


def each(selected=lambda label: True):
    """Yield the selected configurations; a failing example notes its configuration."""
    for label, config in CONFIGURATIONS.items():
        if selected(label):
            note(label)
            yield config


def is_whitened(label):
    return method_of(label) in WHITENED


def has_group_baseline(label):
    return method_of(label) not in {*WHITENED, *WITHOUT_BASELINE} and not is_sloo(label)


def is_shifted_away(label):
    return method_of(label) not in NOT_SHIFTED and not is_sloo(label)


@st.composite
def batches(draw):
    """Groups of 3 to 5 trajectories, and the number of tokens of every turn. (pkpo_sloo with k = 2 needs 3
    trajectories.)"""
    trajectory = st.lists(reward, min_size=1, max_size=4)
    batch = draw(st.lists(st.lists(trajectory, min_size=3, max_size=5), min_size=1, max_size=3))
    tokens = [[[draw(st.integers(1, 4)) for _ in turns] for turns in group] for group in batch]
    return batch, tokens


def close(a, b, tolerance=1e-7):
    assert shape(a) == shape(b)
    assert flat(a) == pytest.approx(flat(b), abs=tolerance, rel=tolerance)


def test_every_method_is_covered():
    assert {config.advantage_method for config in CONFIGURATIONS.values()} == set(METHODS)
    assert {*METHODS} >= {*BATCHWIDE, *WITHOUT_BASELINE, "grpo", "grpo_passk", "gigpo", "mt_grpo"}
    assert {name for name, entry in METHODS.items() if not entry.needs_group} == WITHOUT_BASELINE


@FEW
@given(batch=batches())
def test_advantages_have_the_shape_of_the_rewards_and_are_finite(batch):
    for config in each():
        values = batch_advantages(batch[0], config, batch[1])
        assert shape(values) == shape(batch[0])
        assert all(math.isfinite(value) for value in flat(values))


@pytest.mark.parametrize("label", CONFIGURATIONS)
def test_no_groups_and_no_turns(label):
    config = replace(CONFIGURATIONS[label], passk=PassKConfig(k=1))
    assert turn_advantages([], config) == []
    empty, *others = batch_advantages([[[], [1.0], [0.0]]], config)[0]
    assert empty == []
    assert [len(turns) for turns in others] == [1, 1]
    assert batch_advantages([[[], []]], config) == [[[], []]]


@FEW
@given(batch=batches())
def test_advantages_of_whole_trajectories_sum_to_zero_in_every_group(batch):
    for method in ("grpo", "dr_grpo", "rloo", "gpg"):
        for group in batch_advantages(batch[0], AlgorithmConfig(advantage_method=method), batch[1]):
            assert math.fsum(turns[0] for turns in group) == pytest.approx(0.0, abs=1e-9)


@FEW
@given(batch=batches())
def test_credit_per_turn_sums_to_zero_at_every_turn(batch):
    for method in ("grpo", "dr_grpo", "rloo", "group_based_per_turn"):
        for group in batch_advantages(batch[0], AlgorithmConfig(advantage_method=method, credit="turn")):
            for turn in range(4):
                assert math.fsum(turns[turn] for turns in group if len(turns) > turn) == pytest.approx(0.0, abs=1e-9)


@settings(deadline=None)
@given(batch=batches())
def test_opo_sums_to_zero_over_the_tokens_of_every_group(batch):
    values = batch_advantages(batch[0], AlgorithmConfig(advantage_method="opo"), batch[1])
    for group, tokens in zip(values, batch[1], strict=True):
        assert math.fsum(a * n for a, n in zip(flat(group), flat(tokens), strict=True)) == pytest.approx(0.0, abs=1e-7)


@settings(deadline=None)
@given(batch=batches())
def test_whitened_tokens_have_mean_0_and_variance_1(batch):
    for config in each(is_whitened):
        values = batch_advantages(batch[0], config, batch[1])
        tokens = [a for a, n in zip(flat(values), flat(batch[1]), strict=True) for _ in range(n)]
        if any(tokens):  # else all returns are equal
            assert math.fsum(tokens) == pytest.approx(0.0, abs=1e-6)
            assert math.fsum(a * a for a in tokens) / (len(tokens) - 1) == pytest.approx(1.0, rel=1e-4)


@FEW
@given(batch=batches(), shift=reward)
def test_a_constant_final_reward_changes_no_advantage(batch, shift):
    rewards, tokens = batch
    more = [[[*turns[:-1], turns[-1] + shift] for turns in group] for group in rewards]
    for config in each(is_shifted_away):
        close(batch_advantages(more, config, tokens), batch_advantages(rewards, config, tokens), 1e-6)


@FEW
@given(batch=batches(), data=st.data())
def test_the_order_of_trajectories_and_of_groups_does_not_matter(batch, data):
    rewards, tokens = batch
    of_groups = data.draw(st.permutations(range(len(rewards))))
    within = [data.draw(st.permutations(range(len(group)))) for group in rewards]

    def shuffled(nested):
        return [[nested[p][i] for i in within[p]] for p in of_groups]

    for config in each():
        values = shuffled(batch_advantages(rewards, config, tokens))
        close(batch_advantages(shuffled(rewards), config, shuffled(tokens)), values)


@FEW
@given(batch=batches())
def test_groups_do_not_affect_each_other(batch):
    rewards, tokens = batch
    for config in each(lambda label: method_of(label) not in BATCHWIDE):
        alone = [batch_advantages([g], config, [n])[0] for g, n in zip(rewards, tokens, strict=True)]
        close(batch_advantages(rewards, config, tokens), alone, 1e-9)


@pytest.mark.parametrize("method", sorted(BATCHWIDE))
def test_batchwide_methods_depend_on_the_other_groups(method):
    config, group = AlgorithmConfig(advantage_method=method), [[1.0], [0.0], [0.5]]
    alone, beside = batch_advantages([group], config)[0], batch_advantages([group, [[0.0], [0.0], [4.0]]], config)[0]
    assert flat(alone) != pytest.approx(flat(beside), abs=1e-3)


@FEW
@given(batch=batches(), turns=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=4), size=st.integers(3, 5))
def test_a_group_of_equal_rewards_gets_exactly_0_beside_others(batch, turns, size):
    for config in each(has_group_baseline):
        values = batch_advantages([*batch[0], [turns] * size], config)
        assert values[-1] == [[0.0] * len(turns)] * size


@settings(deadline=None)
@given(
    outcome=st.floats(-1e6, 1e6),
    lengths=st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=5), min_size=1, max_size=4),
)
def test_a_batch_of_equal_rewards_is_whitened_to_exactly_0(outcome, lengths):
    batch = [[[0.0] * (length - 1) + [outcome] for length in group] for group in lengths]
    for config in each(is_whitened):
        assert set(flat(batch_advantages(batch, config))) == {0.0}


def test_methods_that_give_equal_rewards_an_advantage():
    """monte_carlo has no baseline, pkpo_sloo has a baseline over n-1 others, and whitening subtracts the mean of the
    batch."""
    equal = [[1.0], [1.0], [1.0]]
    assert flat(batch_advantages([equal], AlgorithmConfig(advantage_method="monte_carlo"))) == [1.0] * 3
    sloo = AlgorithmConfig(advantage_method="grpo_passk", passk=PassKConfig(k=2, estimator="pkpo_sloo"))
    assert flat(batch_advantages([equal], sloo)) == pytest.approx([-1.0] * 3)  # n (k/n - k/(n-1))
    whitened = AlgorithmConfig(advantage_method="reinforce_pp_baseline")
    values = batch_advantages([equal, [[1.0], [0.0], [0.0]]], whitened, [[[1]] * 3, [[4], [1], [1]]])
    assert values[0] == [[pytest.approx(values[0][0][0])]] * 3
    assert values[0][0][0] < -0.1


@pytest.mark.parametrize("label", [label for label in CONFIGURATIONS if not is_sloo(label)])  # cannot leave 1 of 1 out
def test_a_trajectory_without_peers_gets_0(label):
    config = replace(CONFIGURATIONS[label], passk=PassKConfig(k=1))
    values = flat(batch_advantages([[[2.0, 1.0]], [[5.0]]], config))
    assert any(values) != METHODS[config.advantage_method].needs_group


@FEW
@given(batch=batches(), data=st.data())
def test_breaks_do_not_affect_advantages(batch, data):
    rewards, tokens = batch
    whole = [make_group(g, n) for g, n in zip(rewards, tokens, strict=True)]
    cut = [make_group(g, n) for g, n in zip(rewards, tokens, strict=True)]
    for group in cut:
        for trajectory in group.trajectories:
            for turn in trajectory.turns:
                turn.break_reason = data.draw(st.sampled_from([None, "retoken", "edited"]))
                turn.observation_ids = [1] * data.draw(st.integers(0, 3))
    for config in each():
        assert turn_advantages(cut, config) == turn_advantages(whole, config)


@settings(max_examples=10)
@given(batch=batches(), data=st.data())
def test_summaries_do_not_affect_advantages(batch, data):
    """A summary gets the advantage of the turn after it, and its tokens count as tokens of that turn."""
    rewards, tokens = batch
    folded = [make_group(g, n) for g, n in zip(rewards, tokens, strict=True)]
    for trajectory in (t for group in folded for t in group.trajectories):
        for place in data.draw(st.sets(st.integers(1, len(trajectory.turns)))):
            after = trajectory.environment_turns[place - 1]
            summary = replace(make_turn(0.0, data.draw(st.integers(1, 3)), f"summary {place}"), is_summary=True)
            trajectory.turns.insert(next(n for n, turn in enumerate(trajectory.turns) if turn is after), summary)
    counts = [[[sum(len(t.action_ids) for t in a) for a in t.actions] for t in g.trajectories] for g in folded]
    for config in each():
        expected = batch_advantages(rewards, config, counts)
        found = turn_advantages(folded, config)
        for group, own, turns in zip(folded, expected, found, strict=True):
            for trajectory, values, all_values in zip(group.trajectories, own, turns, strict=True):
                assert all_values == [v for v, a in zip(values, trajectory.actions, strict=True) for _ in a]


@FEW
@given(batch=batches())
def test_token_counts_do_not_affect_advantages(batch):
    for config in each(lambda label: method_of(label) not in {*WHITENED, "opo"}):
        assert batch_advantages(batch[0], config, batch[1]) == batch_advantages(batch[0], config)


@pytest.mark.parametrize("method", [*sorted(WHITENED), "opo"])
def test_methods_that_depend_on_token_counts(method):
    config, group = AlgorithmConfig(advantage_method=method), [[1.0], [0.0], [0.5]]
    longer = batch_advantages([group], config, [[[5], [1], [1]]])
    assert flat(longer) != pytest.approx(flat(batch_advantages([group], config)), abs=1e-3)


@settings(deadline=None)
@given(rewards=groups)
def test_rloo_is_dr_grpo_scaled(rewards):
    for credit in ("trajectory", "turn+outcome"):
        scaled = [
            [[len(group) / (len(group) - 1) * a for a in turns] for turns in group]
            for group in batch_advantages(rewards, AlgorithmConfig(advantage_method="dr_grpo", credit=credit))
        ]
        close(batch_advantages(rewards, AlgorithmConfig(advantage_method="rloo", credit=credit)), scaled, 1e-9)


@settings(deadline=None)
@given(rewards=groups)
def test_dr_grpo_is_grpo_without_the_division(rewards):
    for credit in ("trajectory", "turn", "turn+outcome"):
        dr_grpo = AlgorithmConfig(advantage_method="dr_grpo", credit=credit)
        plain = AlgorithmConfig(advantage_method="grpo", credit=credit, norm_by_std=False)
        assert batch_advantages(rewards, dr_grpo) == batch_advantages(rewards, plain)


@FEW
@given(outcomes=st.lists(st.lists(reward, min_size=2, max_size=6), min_size=1, max_size=3))
def test_with_one_turn_all_credits_are_equal(outcomes):
    batch = [[[r] for r in group] for group in outcomes]
    for method in (name for name, entry in METHODS.items() if len(entry.credits) > 1):
        first, *others = (
            batch_advantages(batch, AlgorithmConfig(advantage_method=method, credit=credit))
            for credit in METHODS[method].credits
        )
        for values in others:
            close(values, first, 1e-9)
