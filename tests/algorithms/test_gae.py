"""GAE per turn and per token: worked numbers of the documentation, a naive double loop, and independence from padding
and observations."""

import itertools
import math

import numpy as np
import pytest
from groups import make_group
from hypothesis import assume, given
from hypothesis import strategies as st

from mtrl.algorithms.advantages import estimate
from mtrl.algorithms.advantages.gae import lambda_returns, token_batch, turn_batch
from mtrl.algorithms.batch import CHUNK, CreditBatch
from mtrl.algorithms.registry import find_estimator
from mtrl.config.algorithm_schema import AlgorithmConfig

number = st.floats(-4.0, 4.0)
share = st.floats(0.0, 1.0)


def config(method="gae", **settings):
    return AlgorithmConfig(advantage_method=method, **{"whiten_advantages": False, **settings})


def batch_of(rewards, values, tokens=None):
    """Return a batch with a trajectory per row."""
    lengths = [len(row) for row in rewards]
    mask = np.arange(max(lengths, default=0)) < np.array(lengths)[:, None]

    def padded(rows):
        out = np.zeros(mask.shape)
        out[mask] = [x for row in rows for x in row]
        return out

    counts = padded(tokens).astype(np.int64) if tokens else mask.astype(np.int64)
    return CreditBatch(padded(rewards), mask, counts, np.zeros(len(rewards), dtype=np.int64), values=padded(values))


def rows_of(array, batch):
    return [row[mask].tolist() for row, mask in zip(array, batch.mask, strict=True)]


def naive(rewards, values, gamma, lam):
    """Return the advantages by the definition: for every step, a sum over all later TD errors."""
    out = []
    for t in range(len(rewards)):
        total = 0.0
        for s in range(t, len(rewards)):
            after = values[s + 1] if s + 1 < len(values) else 0.0
            total += (gamma * lam) ** (s - t) * (rewards[s] + gamma * after - values[s])
        out.append(total)
    return out


@st.composite
def batches(draw, longest=6):
    """Rewards and values of a few trajectories of any length."""
    lengths = draw(st.lists(st.integers(1, longest), min_size=1, max_size=4))
    return tuple([draw(st.lists(number, min_size=n, max_size=n)) for n in lengths] for _ in range(2))


def test_both_are_registered_with_their_traits():
    turn, token = find_estimator("turn_gae"), find_estimator("gae")
    assert turn.needs_critic and not turn.per_token and not turn.needs_group and not turn.credits
    assert token.needs_critic and token.per_token and not token.needs_group and not token.credits
    assert token.function is turn.function


def test_turn_gae_worked():
    batch, cfg = batch_of([[0.2, 0, 1]], [[0.3, 0.4, 0.6]]), config("turn_gae", gamma=0.9, gae_lambda=0.8)
    np.testing.assert_allclose(estimate(batch, cfg), [[0.56816, 0.428, 0.4]], rtol=1e-9)
    np.testing.assert_allclose(lambda_returns(batch, cfg), [[0.86816, 0.828, 1.0]], rtol=1e-9)


def observed_between():
    """Two turns of two tokens have the rewards .5 and 1. The critic's values of the tokens between them (9, 9) are not
    read."""
    group = make_group([[0.5, 1.0]], [[2, 2]])
    return token_batch(CreditBatch.of([group]), np.array([0.1, 0.2, 0.3, 0.4]))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [1.4, 1.3, 0.7, 0.6]),
        ({"gamma": 0.9, "gae_lambda": 0.8}, [0.745453, 0.92424, 0.492, 0.6]),
        ({"whiten_advantages": True}, [0.979796, 0.734847, -0.734847, -0.979796]),
    ],
)
def test_gae_worked_with_observations_between_turns(settings, expected):
    np.testing.assert_allclose(estimate(observed_between(), config(**settings)), [expected], rtol=1e-5)


@pytest.mark.parametrize("method", ["gae", "turn_gae"])
@given(batch=batches(), gamma=share, lam=share)
def test_gae_against_its_definition(method, batch, gamma, lam):
    rewards, values = batch
    cfg, array = config(method, gamma=gamma, gae_lambda=lam), batch_of(rewards, values)
    expected = [naive(r, v, gamma, lam) for r, v in zip(rewards, values, strict=True)]
    found, returns = estimate(array, cfg), lambda_returns(array, cfg)
    for row, advantages in enumerate(expected):
        np.testing.assert_allclose(found[row, array.mask[row]], advantages, atol=1e-9)
        np.testing.assert_allclose(returns[row, array.mask[row]], np.add(advantages, values[row]), atol=1e-9)
    assert not found[~array.mask].any() and not returns[~array.mask].any()


@pytest.mark.parametrize("length", [CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 7])
def test_rows_longer_than_a_chunk(length):
    draw = np.random.default_rng(length)
    rewards, values = draw.normal(size=(2, length))
    batch = batch_of([rewards.tolist(), [1.0]], [values.tolist(), [0.5]])
    found = estimate(batch, config(gamma=0.99, gae_lambda=0.97))
    np.testing.assert_allclose(found[0], naive(rewards, values, 0.99, 0.97), atol=1e-9)
    np.testing.assert_allclose(found[1, :1], [0.5])


@given(batch=batches())
def test_lambda_1_is_the_return_minus_the_value(batch):
    rewards, values = batch
    array = batch_of(rewards, values)
    for found, targets, r, v in zip(
        rows_of(estimate(array, config()), array),
        rows_of(lambda_returns(array, config()), array),
        rewards,
        values,
        strict=True,
    ):
        to_go = [math.fsum(r[t:]) for t in range(len(r))]
        np.testing.assert_allclose(found, np.subtract(to_go, v), atol=1e-9)
        np.testing.assert_allclose(targets, to_go, atol=1e-9)  # for any values


@given(batch=batches(), gamma=share)
def test_lambda_0_is_the_error_of_one_step(batch, gamma):
    rewards, values = batch
    array = batch_of(rewards, values)
    for found, r, v in zip(
        rows_of(estimate(array, config(gamma=gamma, gae_lambda=0.0)), array), rewards, values, strict=True
    ):
        np.testing.assert_allclose(found, np.add(r, gamma * np.array([*v[1:], 0.0])) - v, atol=1e-12)


@given(batch=batches(), gamma=share)
def test_without_values_it_is_the_return_to_go(batch, gamma):
    rewards, _ = batch
    array = batch_of(rewards, [[0.0] * len(r) for r in rewards])
    to_go = [[sum(gamma ** (s - t) * r[s] for s in range(t, len(r))) for t in range(len(r))] for r in rewards]
    for found, expected in zip(rows_of(estimate(array, config(gamma=gamma)), array), to_go, strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-9)


@given(batch=batches(), longer=st.integers(1, 2 * CHUNK))
def test_padding_does_not_affect_advantages(batch, longer):
    """The batch has a longer row, and any values in the padding."""
    rewards, values = batch
    cfg = config(gamma=0.9, gae_lambda=0.8)
    padded = batch_of([*rewards, [1.0] * (6 + longer)], [*values, [0.5] * (6 + longer)])
    padded.values[~padded.mask] = 1e6
    alone = batch_of(rewards, values)
    for of in (estimate, lambda_returns):
        expected, found = rows_of(of(alone, cfg), alone), of(padded, cfg)
        for a, b in zip(expected, rows_of(found, padded), strict=False):
            np.testing.assert_allclose(a, b, atol=1e-9)
        assert not found[~padded.mask].any()


@pytest.mark.parametrize("lam", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("right", [False, True])
def test_the_expected_gradient_by_enumeration(lam, right):
    """An episode continues after turn 1 with probability p, and turn 2 has the reward 1, so dJ/dp = 1.

    With lambda = 1 the expected gradient is right for any values, because a baseline does not change it; with a smaller
    lambda it is right only if the values are.
    """
    p, second = 0.3, 1.0 if right else 0.25
    cfg = config("turn_gae", gae_lambda=lam)
    continued = estimate(batch_of([[0.0, 1.0]], [[0.7, second]]), cfg)[0, 0]
    stopped = estimate(batch_of([[0.0]], [[0.7]]), cfg)[0, 0]
    gradient = p * continued / p - (1 - p) * stopped / (1 - p)
    assert gradient == pytest.approx(1.0 if lam == 1.0 or right else lam + (1 - lam) * second)


@given(batch=batches(), data=st.data())
def test_whitening_weighs_turns_by_their_tokens(batch, data):
    rewards, values = batch
    tokens = [data.draw(st.lists(st.integers(1, 5), min_size=len(r), max_size=len(r))) for r in rewards]
    array = batch_of(rewards, values, tokens)
    raw = [a for row in rows_of(estimate(array, config()), array) for a in row]
    counts = [n for row in tokens for n in row]
    repeated = np.repeat(raw, counts)
    assume(len(repeated) > 1 and np.ptp(repeated) > 1e-6)
    whitened = [a for row in rows_of(estimate(array, config(whiten_advantages=True)), array) for a in row]
    expected = (repeated - repeated.mean()) / np.sqrt(repeated.var(ddof=1) + 1e-8)
    np.testing.assert_allclose(np.repeat(whitened, counts), expected, atol=1e-6)


@given(batch=batches())
def test_whitening_changes_no_target(batch):
    array = batch_of(*batch)
    np.testing.assert_array_equal(
        lambda_returns(array, config(whiten_advantages=True)), lambda_returns(array, config())
    )


@given(prices=st.lists(st.lists(st.sampled_from([0.1, 0.2, 0.3, 0.7]), min_size=1, max_size=5), min_size=1, max_size=4))
def test_a_perfect_critic_gives_advantages_of_exactly_0(prices):
    """The advantages are exactly 0 although the sums are rounded, since whitening would amplify the rounding errors."""
    values = [[sum(row[t:]) for t in range(len(row))] for row in prices]
    assert not estimate(batch_of(prices, values), config(whiten_advantages=True)).any()


@st.composite
def turn_groups(draw):
    """Groups of rewards and token counts per turn. Some turns have no token, but the first turn of each trajectory
    has."""
    shapes = draw(st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=3), min_size=1, max_size=3))
    rewards = [[draw(st.lists(number, min_size=n, max_size=n)) for n in group] for group in shapes]
    tokens = [
        [[draw(st.integers(1, 3)), *draw(st.lists(st.integers(0, 3), min_size=n - 1, max_size=n - 1))] for n in group]
        for group in shapes
    ]
    return [make_group(r, t) for r, t in zip(rewards, tokens, strict=True)]


def token_values(groups):
    """Return a different value for every sampled token."""
    return np.arange(1.0, 1 + sum(t.action_tokens for g in groups for t in g.trajectories))


@given(groups=turn_groups())
def test_columns_are_the_sampled_tokens(groups):
    turns, values = CreditBatch.of(groups), token_values(groups)
    batch = token_batch(turns, values)
    trajectories = [t for g in groups for t in g.trajectories]
    assert batch.mask.sum(axis=1).tolist() == [t.action_tokens for t in trajectories]
    assert batch.values[batch.mask].tolist() == values.tolist()
    assert batch.group.tolist() == turns.group.tolist()
    for row, trajectory in zip(rows_of(batch.rewards, batch), trajectories, strict=True):
        assert sum(row) == pytest.approx(trajectory.reward, abs=1e-9)  # all rewards are included
        place = 0
        for turn, later in itertools.zip_longest(trajectory.turns, trajectory.turns[1:]):
            place += len(turn.action_ids)
            if turn.action_ids and (later is None or later.action_ids):
                assert row[place - 1] == turn.reward
            assert not any(row[place - len(turn.action_ids) : max(place - 1, 0)])


@given(groups=turn_groups())
def test_the_value_of_a_turn_is_that_of_its_first_token(groups):
    values = iter(token_values(groups))
    batch = turn_batch(CreditBatch.of(groups), token_values(groups))
    expected = []
    for trajectory in (t for g in groups for t in g.trajectories):
        own = [[next(values) for _ in turn.action_ids] for turn in trajectory.turns]
        expected.append([tokens[0] for tokens in own if tokens])
    assert rows_of(batch.values, batch) == expected
    assert batch.tokens.sum() == sum(t.action_tokens for g in groups for t in g.trajectories)


@pytest.mark.parametrize("make", [turn_batch, token_batch])
def test_the_reward_of_a_turn_without_tokens_goes_to_the_last_token_before(make):
    group = make_group([[0.25, -1.0, 0.5, 2.0], [1.0]], [[2, 0, 0, 1], [1]])
    batch = make(CreditBatch.of([group]), np.zeros(4))
    assert batch.tokens.tolist() == ([[2, 1], [1, 0]] if make is turn_batch else [[1, 1, 1], [1, 0, 0]])
    assert [[r for r in row if r] for row in rows_of(batch.rewards, batch)] == [[-0.25, 2.0], [1.0]]


@pytest.mark.parametrize("make", [turn_batch, token_batch])
def test_rewards_before_the_first_sampled_token_are_left_out(make):
    """No token has an influence on them, so the batch is that of the turns from this token on."""
    batch, later = (
        make(CreditBatch.of([make_group([rewards, [0.25]], [tokens, [1]])]), np.arange(4.0))
        for rewards, tokens in (([0.5, -0.25, 1.0, 2.0], [0, 0, 2, 1]), ([1.0, 2.0], [2, 1]))
    )
    for name in ("rewards", "mask", "tokens", "values"):
        assert getattr(batch, name).tolist() == getattr(later, name).tolist()


@pytest.mark.parametrize("method", ["turn_gae", "gae"])
def test_trajectories_without_sampled_tokens_have_no_columns(method):
    make = token_batch if method == "gae" else turn_batch
    for rewards, tokens in (([[-1.0], [0.5]], [[0], [1]]), ([[-1.0]], [[0]]), ([[]], [[]])):
        batch = make(CreditBatch.of([make_group(rewards, tokens)]), np.zeros(sum(map(sum, tokens))))
        assert estimate(batch, config(method)).sum() == pytest.approx(0.5 if len(tokens) == 2 else 0.0)
        assert not estimate(
            batch, config(method, whiten_advantages=True)
        ).any()  # each trajectory has at most one token


@pytest.mark.parametrize("method", ["turn_gae", "gae"])
def test_gae_without_values_is_an_error(method):
    with pytest.raises(ValueError, match="need the values of a critic"):
        estimate(CreditBatch.of([make_group([[1.0]])]), config(method))
