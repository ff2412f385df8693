"""Drift between trainer and engine: worked numbers, and sums over micro-batches."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mtrl.algorithms.mismatch import DriftSums, measure

RATIO = torch.tensor([[1.5, 0.4, 1.0], [6.0, 0.9, 777.0]], dtype=torch.float64)
MASK = torch.tensor([[1, 1, 1], [1, 1, 0]])
ROLLOUT = torch.tensor([[-1.0, -2.0, -0.5], [-3.0, -0.1, 0.0]], dtype=torch.float64)
TRAINER = ROLLOUT + RATIO.log()
TRAJECTORY = torch.tensor([[0, 0, 0], [1, 1, 1]])


def test_worked():
    """k1, k3, chi2 and ppl_ratio were measured in verl."""
    metrics = measure(TRAINER, ROLLOUT, MASK, TRAJECTORY).metrics()
    ratios = [1.5, 0.4, 1.0, 6.0, 0.9]
    assert metrics["mismatch/k1"] == pytest.approx(-0.23511, abs=1e-5)
    assert metrics["mismatch/k3"] == pytest.approx(0.72489, abs=1e-5)
    assert metrics["mismatch/chi2"] == pytest.approx(7.044)
    assert metrics["mismatch/chi2_seq"] == pytest.approx(13.76)
    assert metrics["mismatch/ppl_ratio"] == pytest.approx(0.80798, abs=1e-5)
    assert metrics["mismatch/abs_mean"] == pytest.approx(sum(abs(math.log(r)) for r in ratios) / 5)
    assert metrics["mismatch/abs_max"] == pytest.approx(math.log(6.0))
    assert metrics["mismatch/ratio_mean"] == pytest.approx(1.96)
    assert metrics["mismatch/ratio_std"] == pytest.approx(math.sqrt(sum((r - 1.96) ** 2 for r in ratios) / 5))
    assert (metrics["mismatch/ratio_min"], metrics["mismatch/ratio_max"]) == pytest.approx((0.4, 6.0))


def test_the_perplexity_ratio_is_the_trainers_over_the_engines():
    """The ratio is above 1 if the sampled tokens are less likely under the trainer."""
    engine = torch.tensor([0.5, 0.25]).log()
    trainer = torch.tensor([0.25, 0.125]).log()
    metrics = measure(trainer, engine, trajectory=torch.tensor([7, 7])).metrics()
    assert metrics["mismatch/ppl_ratio"] == pytest.approx(2.0)
    assert metrics["mismatch/k1"] == pytest.approx(math.log(2.0))


@given(st.lists(st.tuples(st.floats(-0.9, 0.9), st.integers(0, 5), st.booleans()), min_size=1, max_size=20))
def test_trajectories_are_distinguished_by_index_in_any_order_of_tokens(tokens):
    """The expected numbers are computed per trajectory. Indices may be missing, tokens interleaved, and some tokens
    masked."""
    d = torch.tensor([x for x, _, _ in tokens], dtype=torch.float64)
    trajectory, mask = torch.tensor([t for _, t, _ in tokens]), torch.tensor([m for _, _, m in tokens])
    drift = measure(d - 3.0, torch.full_like(d, -3.0), mask, trajectory)
    own = [d[mask & (trajectory == one)] for one in trajectory[mask].unique()]
    assert drift.trajectories == len(own)
    if own:
        metrics = drift.metrics()
        chi2 = sum(math.exp(2 * x.sum()) for x in own) / len(own) - 1
        assert metrics["mismatch/chi2_seq"] == pytest.approx(chi2, rel=1e-6, abs=1e-9)
        assert metrics["mismatch/ppl_ratio"] == pytest.approx(sum(math.exp(-x.mean()) for x in own) / len(own))


def test_without_trajectories_there_is_nothing_per_trajectory():
    plain = measure(TRAINER, ROLLOUT, MASK)
    assert plain.trajectories == 0
    whole = measure(TRAINER, ROLLOUT, MASK, TRAJECTORY).metrics()
    assert plain.metrics() == {key: whole[key] for key in whole if key.split("/")[1] not in ("chi2_seq", "ppl_ratio")}


def test_sums_of_micro_batches_equal_those_of_all_tokens():
    rows = [measure(TRAINER[i], ROLLOUT[i], MASK[i], TRAJECTORY[0]) for i in range(2)]
    joined = rows[0] + DriftSums() + rows[1]
    assert joined.metrics() == pytest.approx(measure(TRAINER, ROLLOUT, MASK, TRAJECTORY).metrics())


def test_no_drift_and_no_tokens():
    same = measure(ROLLOUT, ROLLOUT, trajectory=TRAJECTORY).metrics("drift/")
    assert same["drift/abs_max"] == same["drift/k1"] == same["drift/k3"] == same["drift/chi2"] == 0.0
    assert same["drift/ratio_min"] == same["drift/ratio_max"] == same["drift/ppl_ratio"] == 1.0
    assert same["drift/chi2_seq"] == 0.0
    assert measure(ROLLOUT, ROLLOUT, torch.zeros_like(MASK), TRAJECTORY) == DriftSums()
    assert DriftSums().metrics() == {}


def test_a_huge_drift_is_reported_unclamped_with_a_finite_ratio():
    trainer, rollout = torch.tensor([-1.0, -1.0], requires_grad=True), torch.tensor([-1001.0, -1001.0])
    metrics = measure(trainer, rollout, trajectory=torch.tensor([0, 0])).metrics()
    assert metrics["mismatch/abs_max"] == 1000.0
    assert metrics["mismatch/ratio_max"] == pytest.approx(math.exp(20))
    assert metrics["mismatch/chi2_seq"] == pytest.approx(math.exp(40))
    assert metrics["mismatch/ppl_ratio"] == pytest.approx(math.exp(-20))
