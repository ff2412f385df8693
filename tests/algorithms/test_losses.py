"""Losses: worked values and gradients (measured in verl), invariants, extreme values."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mtrl.algorithms.losses import (
    TokenBatch,
    binary_kl,
    cispo,
    decoupled_ppo,
    dppo,
    gspo,
    importance_sampling,
    ppo,
    sapo,
    weighted_sum,
)
from mtrl.algorithms.registry import LOSSES, find_loss
from mtrl.config.algorithm_schema import AlgorithmConfig, DppoConfig, SapoConfig

# Two trajectories, of three and of two tokens.
RATIO = torch.tensor([1.5, 0.5, 1.0, 1.5, 4.0], dtype=torch.float64)
OLD = torch.tensor([-1.0, -1.0, -1.0, -2.0, -2.0], dtype=torch.float64)
ADVANTAGE = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0], dtype=torch.float64)
TRAJECTORY = torch.tensor([0, 0, 0, 1, 1])
TOKEN_MEAN = torch.full((5,), 1 / 5, dtype=torch.float64)
SEQUENCE_MEAN = torch.tensor([1 / 6] * 3 + [1 / 4] * 2, dtype=torch.float64)
SEQUENCE_SUM = torch.full((5,), 1 / 2, dtype=torch.float64)

ALL = sorted({find_loss(name).name for name in LOSSES.names()})
every_loss = pytest.mark.parametrize("name", ALL)
GSPO = {"clip_low_threshold": 1 - 3e-4, "clip_high_threshold": 1 + 4e-4}


def config(**settings):
    return AlgorithmConfig(**settings)


def evaluate(loss_fn, settings, weights=TOKEN_MEAN, ratio=RATIO, advantages=ADVANTAGE, **fields):
    """Return value, gradient and metrics of a loss, by default for the worked example."""
    logprobs = (OLD + ratio.log()).requires_grad_()
    tokens = TokenBatch(logprobs, OLD, advantages, **{"trajectory": TRAJECTORY, **fields})
    losses, metrics = loss_fn(tokens, settings)
    assert losses.shape == logprobs.shape
    assert metrics.keys() == {"ratio", "clipped"}
    assert all(m.shape == logprobs.shape and not m.requires_grad for m in metrics.values())
    loss = weighted_sum(losses, weights)
    loss.backward()
    return loss.item(), logprobs.grad, metrics


def assert_gradient(gradient, expected, tolerance=1e-6):
    torch.testing.assert_close(gradient, torch.tensor(expected, dtype=torch.float64), atol=tolerance, rtol=0)


def test_the_names_of_the_losses():
    assert ALL == ["cispo", "decoupled_ppo", "dppo", "gspo", "importance_sampling", "ppo", "sapo"]
    assert [name for name in ALL if find_loss(name).per_trajectory] == ["gspo"]
    assert find_loss("reinforce_is") is find_loss("importance_sampling")


# ---- worked numbers


@pytest.mark.parametrize(
    ("settings", "loss", "gradient"),
    [
        ({"dual_clip": 3.0}, 0.36, [0, -0.1, -0.2, 0.3, 0]),
        ({"dual_clip": 3.0, "clip_high_threshold": 1.6}, 0.30, [-0.3, -0.1, -0.2, 0.3, 0]),
        ({"dual_clip": 10.0}, 0.56, [0, -0.1, -0.2, 0.3, 0.8]),
        ({}, 0.56, [0, -0.1, -0.2, 0.3, 0.8]),
    ],
)
def test_ppo_worked(settings, loss, gradient):
    value, grad, _ = evaluate(ppo, config(**settings))
    assert value == pytest.approx(loss)
    assert_gradient(grad, gradient)


def test_ppo_worked_with_other_token_weights():
    value, grad, _ = evaluate(ppo, config(dual_clip=3.0), SEQUENCE_MEAN)
    assert value == pytest.approx(0.675)
    assert_gradient(grad, [0, -0.083333, -0.166667, 0.375, 0])
    assert evaluate(ppo, config(dual_clip=3.0), SEQUENCE_SUM)[0] == pytest.approx(0.9)


@pytest.mark.parametrize(
    ("low", "high", "loss", "gradient"),
    [
        (0.8, 1.28, 0.057795, [-0.256, -0.16, -0.2, 0.256, 0.256]),
        (0.0, 5.0, -0.42165, [-0.3, -0.1, -0.2, 0.3, 0.8]),
    ],
)
def test_cispo_worked(low, high, loss, gradient):
    value, grad, _ = evaluate(cispo, config(clip_low_threshold=low, clip_high_threshold=high))
    assert value == pytest.approx(loss, abs=1e-6)
    assert_gradient(grad, gradient)


def test_importance_sampling_has_only_an_upper_bound():
    _, grad, metrics = evaluate(importance_sampling, config(is_cap=2.0))
    assert_gradient(grad, [-0.3, -0.1, -0.2, 0.3, 0.4])
    assert metrics["clipped"].tolist() == [0, 0, 0, 0, 1]
    _, grad, _ = evaluate(importance_sampling, config(is_cap=math.inf))
    assert grad[-1] == pytest.approx(0.8)


def test_gspo_worked():
    value, grad, metrics = evaluate(gspo, config(**GSPO), SEQUENCE_MEAN)
    assert value == pytest.approx(0.770465, abs=1e-6)
    assert_gradient(grad, [-0.15143] * 3 + [0.61237] * 2, 1e-5)
    assert metrics["ratio"].tolist() == pytest.approx([0.75 ** (1 / 3)] * 3 + [math.sqrt(6)] * 2)


def test_gspo_applies_dual_clip_if_it_is_set():
    value, grad, metrics = evaluate(gspo, config(**GSPO, dual_clip=2.0), SEQUENCE_MEAN)
    assert value == pytest.approx((2.0 - 0.75 ** (1 / 3)) / 2)
    assert_gradient(grad, [-0.15143] * 3 + [0, 0], 1e-5)
    assert metrics["clipped"].tolist() == [0, 0, 0, 1, 1]


def test_sapo_worked():
    value, grad, metrics = evaluate(sapo, config(), SEQUENCE_MEAN)
    assert value == pytest.approx(0.511643, abs=1e-6)
    assert_gradient(grad, [-0.235, -0.07833, -0.16667, 0.3503, 0.15761], 1e-5)
    assert not metrics["clipped"].any()


def test_dppo_worked():
    value, grad, metrics = evaluate(dppo, config(is_cap=3.0))
    assert value == pytest.approx(-0.298909, abs=1e-6)
    assert_gradient(grad, [-0.3, -0.1, -0.2, 0.3, 0.6])
    assert metrics["clipped"].tolist() == [0, 0, 0, 0, 1]  # the cap; the divergence masks nothing


def test_decoupled_ppo_is_ppo_times_a_capped_behaviour_weight():
    behaviour = OLD - torch.tensor([0.5, 2.0, 0.25, 8.0, 1.0], dtype=torch.float64).log()
    value, grad, metrics = evaluate(decoupled_ppo, config(is_cap=5.0, dual_clip=3.0), rollout_logprobs=behaviour)
    weight = [0.5, 2.0, 0.25, 5.0, 1.0]
    assert value == pytest.approx(sum(w * x for w, x in zip(weight, [-1.2, -0.5, -1.0, 1.5, 3.0], strict=True)) / 5)
    assert_gradient(grad, [0, -0.1 * 2, -0.2 * 0.25, 0.3 * 5, 0])
    torch.testing.assert_close(metrics["ratio"], RATIO)
    assert metrics["clipped"].tolist() == [1, 0, 0, 1, 1]  # PPO's bound, the cap, dual clip


# ---- DPPO's mask


@pytest.mark.parametrize("divergence", ["tv", "kl"])
@pytest.mark.parametrize(
    ("old", "new", "advantage", "is_trained"),
    [
        (0.1, 0.9, 1.0, False),  # the probability has increased by far too much
        (0.1, 0.9, -1.0, True),  # the difference is large, but the step reduces it
        (0.9, 0.1, -1.0, False),
        (0.9, 0.1, 1.0, True),
        (0.50, 0.52, 1.0, True),
        (0.52, 0.50, -1.0, True),
        (1e-6, 1e-4, 1.0, True),  # a ratio of 100 that moves hardly any probability, which PPO would clip
    ],
)
def test_dppo_masks_tokens_that_have_moved_too_far_in_the_direction_of_their_advantage(
    divergence, old, new, advantage, is_trained
):
    logprobs = torch.tensor([math.log(new)], requires_grad=True)
    tokens = TokenBatch(logprobs, torch.tensor([math.log(old)]), torch.tensor([advantage]))
    losses, metrics = dppo(tokens, config(is_cap=math.inf, dppo=DppoConfig(divergence, 0.05, 0.05)))
    losses.sum().backward()
    assert logprobs.grad.item() == pytest.approx(-advantage * new / old if is_trained else 0.0, rel=1e-5)
    assert metrics["clipped"].item() == (not is_trained)


def test_dppo_has_a_threshold_for_each_direction():
    settings = config(is_cap=math.inf, dppo=DppoConfig("tv", delta_low=0.1, delta_high=0.3))
    old = torch.tensor([0.5, 0.5, 0.5, 0.5]).log()
    logprobs = torch.tensor([0.7, 0.85, 0.45, 0.3]).log()
    _, metrics = dppo(TokenBatch(logprobs, old, torch.tensor([1.0, 1.0, -1.0, -1.0])), settings)
    assert metrics["clipped"].tolist() == [0, 1, 0, 1]


@given(st.floats(0.001, 0.999), st.floats(0.001, 0.999))
def test_binary_kl_is_the_kl_of_two_bernoulli_distributions(old, new):
    coin = [torch.distributions.Bernoulli(torch.tensor(p, dtype=torch.float64)) for p in (old, new)]
    expected = torch.distributions.kl_divergence(*coin).item()
    found = binary_kl(torch.tensor(old, dtype=torch.float64), torch.tensor(new, dtype=torch.float64)).item()
    assert found == pytest.approx(expected, abs=1e-12)


def test_binary_kl_of_a_certain_token_is_not_infinite_by_rounding():
    """In float32 a log-prob of -3e-9 is a probability of 1, and 1 - p is 0."""
    old, new = torch.tensor([-6e-8, 0.0, -1e-7]).exp(), torch.tensor([-3e-9, -6e-8, 2e-7]).exp()
    assert (binary_kl(old, new).abs() < 1e-5).all()
    far = binary_kl(torch.tensor([0.5, 0.5]), torch.tensor([0.0, 1.0]))
    assert (far > 7.0).all()


# ---- GSPO and its trajectories


@given(st.data())
def test_gspo_has_the_gradient_of_the_sequence_form(data):
    """Mean over trajectories of max(-A s, -A clip(s)), s = exp(mean of lp - old), by autograd."""
    lengths = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    seed = data.draw(st.integers(0, 2**16))
    generator = torch.Generator().manual_seed(seed)
    index = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    old, shift = (torch.randn(len(index), generator=generator, dtype=torch.float64) for _ in range(2))
    advantages = torch.randn(len(lengths), generator=generator, dtype=torch.float64)
    settings = config(clip_low_threshold=0.8, clip_high_threshold=1.3)

    whole = (old + 0.5 * shift).requires_grad_()
    ratios = torch.stack([(whole - old)[index == i].mean().exp() for i in range(len(lengths))])
    sequences = torch.maximum(-advantages * ratios, -advantages * ratios.clamp(0.8, 1.3))
    sequences.mean().backward()

    logprobs = (old + 0.5 * shift).requires_grad_()
    tokens = TokenBatch(logprobs, old, advantages[index], trajectory=index)
    weights = 1.0 / torch.tensor(lengths, dtype=torch.float64)[index] / len(lengths)
    losses, metrics = gspo(tokens, settings)
    value = weighted_sum(losses, weights)
    value.backward()
    assert value.item() == pytest.approx(sequences.mean().item())
    torch.testing.assert_close(logprobs.grad, whole.grad, rtol=1e-10, atol=1e-14)
    assert metrics["clipped"].bool().equal(logprobs.grad == 0)


@given(st.permutations(range(5)))
def test_gspo_does_not_depend_on_the_order_of_tokens(order):
    def losses_of(rows):
        fields = (OLD + RATIO.log())[rows], OLD[rows], ADVANTAGE[rows]
        return gspo(TokenBatch(*fields, trajectory=TRAJECTORY[rows]), config(**GSPO))[0]

    torch.testing.assert_close(losses_of(order), losses_of(list(range(5)))[order])


def test_gspo_is_precise_for_small_means_in_float32():
    """The bounds are 3e-4 from 1, which is the fourth digit of a log-prob of -10 in float32."""
    old = torch.full((4,), -17.3)
    logprobs = old + torch.tensor([1e-5, 2e-5, 0.0, -1e-5])
    exact = (logprobs.double() - old.double()).mean()
    _, metrics = gspo(TokenBatch(logprobs, old, torch.ones(4)), config(**GSPO))
    assert metrics["ratio"].double().log().numpy() == pytest.approx(exact.item(), abs=1e-7)


# ---- what all have in common

tensors = st.lists(st.floats(-3, 3), min_size=1, max_size=12)


@every_loss
@given(shifts=tensors, seed=st.integers(0, 2**16))
def test_on_policy_the_gradient_is_minus_advantage_times_weight(name, shifts, seed):
    old = -torch.tensor(shifts, dtype=torch.float64).exp()
    generator = torch.Generator().manual_seed(seed)
    advantages, weights = (torch.randn(len(old), generator=generator, dtype=torch.float64) for _ in range(2))
    index = torch.randint(0, 3, (len(old),), generator=generator)
    logprobs = old.clone().requires_grad_()
    tokens = TokenBatch(logprobs, old, advantages, old.clone(), index)
    losses, metrics = find_loss(name)(tokens, config(dual_clip=3.0))
    weighted_sum(losses, weights).backward()
    torch.testing.assert_close(logprobs.grad, -advantages * weights)
    assert not metrics["clipped"].any()
    torch.testing.assert_close(metrics["ratio"], torch.ones_like(old))


@every_loss
@given(advantage=st.floats(0.1, 3), shift=st.floats(-2, 2))
def test_a_step_makes_good_tokens_likelier_and_bad_ones_less_so(name, advantage, shift):
    """The gradient never has the sign of the advantage."""
    for sign in (1.0, -1.0):
        logprobs = torch.tensor([-1.0, -2.5], dtype=torch.float64).requires_grad_()
        advantages = torch.tensor([sign * advantage] * 2, dtype=torch.float64)
        old = logprobs.detach() + torch.tensor([shift, -shift], dtype=torch.float64)
        find_loss(name)(TokenBatch(logprobs, old, advantages), config(dual_clip=3.0))[0].sum().backward()
        assert (logprobs.grad * sign <= 0).all()


@pytest.mark.parametrize("name", ["cispo", "importance_sampling"])
@given(shift=st.floats(-3, 3))
def test_losses_with_one_bound_are_odd_in_the_advantage(name, shift):
    """The gradient is an odd function of the advantage."""

    def gradient(sign):
        logprobs = torch.tensor([-1.0], dtype=torch.float64).requires_grad_()
        advantages = torch.tensor([sign], dtype=torch.float64)
        find_loss(name)(TokenBatch(logprobs, logprobs.detach() - shift, advantages), config())[0].sum().backward()
        return logprobs.grad.item()

    assert gradient(1.0) == pytest.approx(-gradient(-1.0))


@pytest.mark.parametrize("name", ["ppo", "dppo", "dppo/kl"])
@pytest.mark.parametrize("distance", [0.1, 0.19, 0.21, 0.4])
def test_bounds_for_good_and_bad_tokens_are_symmetric(name, distance):
    """A bad token may decrease as far as a good one may increase: in log-ratio for PPO, from a probability of 1/2 for
    DPPO."""
    name, _, divergence = name.partition("/")
    bounds = {"clip_low_threshold": math.exp(-0.2), "clip_high_threshold": math.exp(0.2)}
    limit = (
        0.5 * math.log(0.25 / (0.7 * 0.3)) if divergence else 0.2
    )  # the KL from 0.5 to 0.7 corresponds to a TV of 0.2
    settings = config(**bounds, is_cap=math.inf, dppo=DppoConfig(divergence or "tv", limit, limit))
    half = torch.tensor([0.5, 0.5], dtype=torch.float64)
    away = torch.tensor([distance, -distance], dtype=torch.float64)
    logprobs = half.log() + away if name == "ppo" else (half + away).log()
    _, metrics = find_loss(name)(TokenBatch(logprobs, half.log(), away.sign()), settings)
    assert metrics["clipped"].tolist() == [float(distance > 0.2)] * 2


def test_sapo_is_symmetric_at_equal_temperatures_and_damps_bad_tokens_more_by_default():
    same = config(sapo=SapoConfig(tau_positive=2.0, tau_negative=2.0))
    for settings, equal in ((same, True), (config(), False)):
        good = evaluate(sapo, settings, advantages=torch.ones(5, dtype=torch.float64))[1]
        bad = evaluate(sapo, settings, advantages=-torch.ones(5, dtype=torch.float64))[1]
        assert torch.allclose(good, -bad) == equal
    off = RATIO != 1
    assert (bad.abs()[off] < good.abs()[off]).all()


def test_clipped_marks_the_tokens_without_gradient_under_ppo():
    _, grad, metrics = evaluate(ppo, config(dual_clip=3.0), torch.ones_like(TOKEN_MEAN))
    assert metrics["clipped"].bool().equal(grad == 0)
    torch.testing.assert_close(metrics["ratio"], RATIO)
    _, _, metrics = evaluate(cispo, config())
    assert metrics["clipped"].tolist() == [1, 1, 0, 1, 1]


@every_loss
@given(seed=st.integers(0, 2**16))
def test_clipped_marks_exactly_the_tokens_that_the_bounds_changed(name, seed):
    """Compared with the same loss without bounds, the gradient differs where `clipped` is 1 and is equal elsewhere."""
    generator = torch.Generator().manual_seed(seed)
    old, shift, gap, advantages = (torch.randn(20, generator=generator, dtype=torch.float64) for _ in range(4))
    old = -old.exp()
    index = torch.arange(20) // 4

    def gradient(settings):
        logprobs = (old + shift).requires_grad_()
        losses, metrics = find_loss(name)(TokenBatch(logprobs, old, advantages, old + gap, index), settings)
        losses.sum().backward()
        return logprobs.grad, metrics["clipped"].bool()

    bounded, clipped = gradient(config(dual_clip=1.5, is_cap=1.7))
    wide = {"clip_low_threshold": 0.0, "clip_high_threshold": math.inf, "is_cap": math.inf}
    free, none = gradient(config(**wide, dppo=DppoConfig("tv", math.inf, math.inf)))
    assert not none.any()
    assert torch.isclose(bounded, free, rtol=1e-12, atol=0.0).equal(~clipped)


def test_ppo_is_pessimistic():
    """Clipping never increases the surrogate objective, and dual clip bounds the loss of negative advantages."""
    generator = torch.Generator().manual_seed(1)
    old, shift, advantages = (torch.randn(500, generator=generator) for _ in range(3))
    plain, _ = ppo(TokenBatch(old + shift, old, advantages), config())
    assert (plain >= -advantages * shift.exp() - 1e-6).all()
    dual, _ = ppo(TokenBatch(old + 3 * shift, old, advantages), config(dual_clip=3.0))
    negative = advantages < 0
    assert (dual[negative] <= -3.0 * advantages[negative] + 1e-6).all()


@pytest.mark.parametrize("name", [*ALL, "dppo/kl"])
@pytest.mark.parametrize("dual_clip", [None, 3.0])
@pytest.mark.parametrize("gap", [-1e4, -500.0, 500.0, 1e4, math.inf])
@pytest.mark.parametrize("anchor", ["rollout", "old"])
def test_extreme_log_probs_give_finite_results(name, gap, dual_clip, anchor):
    """An infinite gap is an old log-prob of -inf: a token with the probability 0 under the old policy."""
    logprobs = torch.tensor([-1.0, -700.0, -1e-9, -1.0, -700.0], requires_grad=True)
    old = logprobs.detach() - gap
    advantages = torch.tensor([1.0, -1.0, 0.0, 0.0, 1.0])
    rollout = old.clone() if anchor == "rollout" else logprobs.detach() + 3.0
    name, _, divergence = name.partition("/")
    settings = config(
        is_cap=math.inf, clip_high_threshold=1e30, dual_clip=dual_clip, dppo=DppoConfig(divergence or "tv")
    )
    tokens = TokenBatch(logprobs, old, advantages, rollout, torch.tensor([0, 0, 1, 1, 2]))
    losses, metrics = find_loss(name)(tokens, settings)
    losses.sum().backward()
    assert losses.isfinite().all() and logprobs.grad.isfinite().all()
    assert all(values.isfinite().all() for values in metrics.values())
    assert logprobs.grad[advantages == 0].tolist() == [0.0, 0.0]
    if name in ("ppo", "gspo", "sapo", "decoupled_ppo"):  # the gradient passes through the ratio
        assert not logprobs.grad.any()


def test_non_finite_padding_does_not_affect_the_sum():
    losses = torch.tensor([1.0, math.nan, math.inf], requires_grad=True)
    total = weighted_sum(losses, torch.tensor([0.5, 0.0, 0.0]))
    total.backward()
    assert total.item() == 0.5
    assert losses.grad.tolist() == [0.5, 0.0, 0.0]
