"""Off-policy corrections: worked weights (measured in verl), bounds, and statistics."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mtrl.algorithms.corrections import Reweighting
from mtrl.algorithms.losses import TokenBatch
from mtrl.algorithms.registry import CORRECTIONS, find_correction
from mtrl.config.algorithm_schema import AlgorithmConfig

# Two trajectories, of three and of two tokens; the product of their ratios is 0.6 and 5.4.
RATIO = torch.tensor([1.5, 0.4, 1.0, 6.0, 0.9], dtype=torch.float64)
TRAJECTORY = torch.tensor([0, 0, 0, 1, 1])

ALL = ["geometric", "icepop", "mis", "none", "sequence_tis", "tis"]
PER_TRAJECTORY = ["geometric", "mis", "sequence_tis"]
every_correction = pytest.mark.parametrize("name", ALL)


def weights(name, ratio=RATIO, trajectory=TRAJECTORY, **settings):
    difference = torch.as_tensor(ratio, dtype=torch.float64).log().requires_grad_()
    zeros = torch.zeros_like(difference)
    tokens = TokenBatch(zeros, zeros, zeros, None, trajectory)
    found = find_correction(name)(difference, tokens, AlgorithmConfig(**settings))
    assert found.shape == difference.shape and found.dtype == difference.dtype
    assert not found.requires_grad
    return found


def test_the_names_of_the_corrections():
    assert CORRECTIONS.names() == ALL
    assert [name for name in ALL if find_correction(name).per_trajectory] == PER_TRAJECTORY


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("none", [1, 1, 1, 1, 1]),
        ("tis", [1.5, 0.4, 1, 2, 0.9]),
        ("sequence_tis", [0.6, 0.6, 0.6, 2, 2]),
        ("icepop", [1.5, 0, 1, 0, 0.9]),
        ("mis", [1, 1, 1, 0, 0]),
        ("geometric", [0, 0, 0, 0, 0]),
    ],
)
def test_worked(name, expected):
    assert weights(name).tolist() == pytest.approx(expected)


def test_geometric_masks_by_the_mean_for_any_length():
    """The product of 5000 ratios of 1.0005 is 12, far outside the bounds of `mis`."""
    long, far = [1.0005] * 5000, [1.002] * 2
    trajectory = torch.tensor([0] * 5000 + [1] * 2)
    found = weights("geometric", long + far, trajectory)
    assert found[:5000].all() and not found[5000:].any()
    assert not weights("mis", long, trajectory[:5000]).any()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("tis", [1.2, 0.5, 1, 1.2, 0.9]),
        ("sequence_tis", [0.6, 0.6, 0.6, 1.2, 1.2]),
        ("icepop", [0, 0, 1, 0, 0.9]),
        ("mis", [1, 1, 1, 0, 0]),
        ("geometric", [1, 1, 1, 0, 0]),
    ],
)
def test_configured_bounds_replace_the_published_ones(name, expected):
    assert weights(name, correction_low=0.5, correction_high=1.2).tolist() == pytest.approx(expected)


@pytest.mark.parametrize(("name", "expected"), [("icepop", [1.5, 0.4, 1, 0, 0.9]), ("tis", [1.5, 0.4, 1, 2, 0.9])])
def test_one_bound_can_be_configured_alone(name, expected):
    assert weights(name, correction_low=0.1).tolist() == pytest.approx(expected)


@pytest.mark.parametrize(("name", "low", "high"), [("icepop", 0.5, 5), ("mis", 0.5, 2), ("geometric", 0.999, 1.001)])
def test_the_published_bounds(name, low, high):
    ratio = [low * 1.0001, low * 0.9999, high * 0.9999, high * 1.0001]
    assert (weights(name, ratio, torch.arange(4)) != 0).tolist() == [True, False, True, False]


@every_correction
@given(st.integers(0, 6))
def test_equal_log_probs_of_engine_and_trainer_have_weight_1(name, count):
    assert weights(name, [1.0] * count, torch.zeros(count, dtype=torch.long)).tolist() == [1.0] * count


@st.composite
def some_tokens(draw):
    """Ratios and trajectory indices of up to 12 tokens, interleaved; no ratio lies on a bound."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    count = draw(st.integers(1, 12))
    ratio = torch.randn(count, generator=generator, dtype=torch.float64).exp()
    return ratio, torch.randint(0, 4, (count,), generator=generator)


@every_correction
@given(some_tokens(), st.data())
def test_the_order_of_the_tokens_does_not_matter(name, batch, data):
    ratio, trajectory = batch
    order = data.draw(st.permutations(range(len(ratio))))
    torch.testing.assert_close(weights(name, ratio[order], trajectory[order]), weights(name, ratio, trajectory)[order])


@pytest.mark.parametrize("name", PER_TRAJECTORY)
@given(some_tokens())
def test_a_trajectory_has_one_weight_that_does_not_depend_on_others(name, batch):
    ratio, trajectory = batch
    found = weights(name, ratio, trajectory)
    for one in trajectory.unique():
        own = found[trajectory == one]
        alone = weights(name, ratio[trajectory == one], torch.zeros(len(own), dtype=torch.long))
        assert own.unique().numel() == 1
        torch.testing.assert_close(own, alone)


@given(some_tokens())
def test_truncated_weights_are_the_ratio_or_the_cap(batch):
    ratio, trajectory = batch
    assert weights("tis", ratio, trajectory).tolist() == pytest.approx([min(r, 2.0) for r in ratio.tolist()])
    products = [ratio[trajectory == own].prod().item() for own in trajectory]
    found = weights("sequence_tis", ratio, trajectory).tolist()
    assert found == pytest.approx([min(product, 2.0) for product in products], abs=1e-8)


@every_correction
@pytest.mark.parametrize("gap", [500.0, math.inf])
def test_extreme_differences_have_finite_weights(name, gap):
    """An infinite difference means that the engine or the trainer gave a sampled token the probability 0."""
    difference = torch.tensor([gap, -gap, gap, -gap])
    zeros = torch.zeros(4)
    tokens = TokenBatch(zeros, zeros, zeros, None, torch.tensor([0, 1, 2, 2]))
    found = find_correction(name)(difference, tokens, AlgorithmConfig(correction_low=0.0, correction_high=math.inf))
    assert found.isfinite().all()
    if name in ("tis", "icepop"):
        assert found.tolist() == pytest.approx([math.exp(20), math.exp(-20)] * 2)


# ---- what is counted


def test_reweighting_worked():
    metrics = Reweighting.of(weights("icepop")).metrics()
    assert metrics == pytest.approx(
        {"correction/kept_frac": 3 / 5, "correction/weight_mean": 3.4 / 5, "correction/weight_max": 1.5}
    )


def test_sums_of_micro_batches_equal_those_of_all_tokens():
    found = weights("tis")
    joined = Reweighting.of(found[:2]) + Reweighting() + Reweighting.of(found[2:])
    assert joined.metrics("a/") == pytest.approx(Reweighting.of(found).metrics("a/"))


def test_no_tokens_have_no_metrics():
    assert Reweighting.of(torch.zeros(0)) == Reweighting()
    assert Reweighting().metrics() == {}
