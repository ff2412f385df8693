"""pass@k: worked numbers, the definition over subsets, and the gradient of Bernoulli samples by enumeration."""

import itertools
import math
import statistics
from fractions import Fraction

import numpy as np
import pytest
from groups import advantages, batch_advantages, flat, reward
from hypothesis import given, settings
from hypothesis import strategies as st

from mtrl.algorithms.advantages.pass_at_k import chen, chen_differences, pkpo_s, pkpo_sloo, pkpo_sloo1, top2
from mtrl.config.algorithm_schema import AlgorithmConfig, PassKConfig
from mtrl.errors import UserError
from mtrl.scoring.pass_at_k import pass_at_k

BINARY = np.array([1.0, 0.0, 0.0, 1.0])
GRADED = np.array([0.1, 0.3, 0.5, 0.7, 0.9])
rewards_and_k = st.lists(reward, min_size=2, max_size=7).flatmap(
    lambda rewards: st.tuples(st.just(np.array(rewards)), st.integers(1, len(rewards)))
)


def passk(estimator, k):
    return {"method": "grpo_passk", "passk": PassKConfig(k=k, estimator=estimator)}


def successes(c, n):
    return np.array([1.0] * c + [0.0] * (n - c))


# ---- worked numbers


def test_pkpo_worked_on_successes():
    assert pkpo_s(BINARY, 2).sum() == pytest.approx(2 * 0.833333, abs=1e-5)
    assert pkpo_s(BINARY, 2) == pytest.approx([0.5, 0.333333, 0.333333, 0.5], abs=1e-6)
    assert pkpo_sloo(BINARY, 2) == pytest.approx([0.055556, -0.333333, -0.333333, 0.055556], abs=1e-6)
    assert pkpo_sloo1(BINARY, 2) == pytest.approx([0.333333, 0.0, 0.0, 0.333333], abs=1e-6)


def test_pkpo_worked_on_graded_rewards():
    assert pkpo_s(GRADED, 2).sum() == pytest.approx(2 * 0.7)
    assert pkpo_s(GRADED, 2) == pytest.approx([0.24, 0.24, 0.26, 0.3, 0.36])
    assert pkpo_sloo(GRADED, 2) == pytest.approx([-0.143333, -0.143333, -0.106667, -0.033333, 0.076667], abs=1e-6)
    assert pkpo_sloo1(GRADED, 2) == pytest.approx([0.0, 0.02, 0.06, 0.12, 0.2])


def test_chen_worked():
    assert chen(BINARY, 2) == pytest.approx([0.447212, -0.447212, -0.447212, 0.447212], abs=1e-6)
    assert chen_differences(BINARY, 2) == pytest.approx([0.166667, -0.166667, -0.166667, 0.166667], abs=1e-6)
    assert chen(successes(1, 8), 4) == pytest.approx([0.999998] + [-0.142857] * 7, abs=1e-6)
    assert chen(successes(2, 8), 4) == pytest.approx([0.522232] * 2 + [-0.174077] * 6, abs=1e-6)
    assert chen(successes(5, 8), 4).tolist() == [0.0] * 8
    assert chen(successes(0, 8), 4).tolist() == [0.0] * 8


def test_top2_worked():
    """With two successes of four, the best trajectory has no lead over the second best."""
    assert top2(BINARY).tolist() == [0.0] * 4
    assert top2(np.array([0.25, 1.0, 0.5])) == pytest.approx([0.0, 0.5, 0.0])


def test_the_sum_of_pkpo_is_pass_at_k_as_in_evaluation():
    values = [0.25, 0.464286, 0.642857, 0.785714, 0.892857, 0.964286, 1.0, 1.0]
    found = [pkpo_s(successes(2, 8), k).sum() / k for k in range(1, 9)]
    assert found == pytest.approx(values, abs=1e-6)
    assert found == pytest.approx([pass_at_k(8, 2, k) for k in range(1, 9)])


# ---- the definition, subset by subset


def mean_best(rewards, k):
    return statistics.mean(max(subset, default=0.0) for subset in itertools.combinations(rewards, k))


def naive_s(rewards, k):
    n = len(rewards)
    subsets = list(itertools.combinations(range(n), k))
    return [sum(max(rewards[j] for j in s) for s in subsets if i in s) / len(subsets) for i in range(n)]


def without(rewards, i):
    return [*rewards[:i], *rewards[i + 1 :]]


@settings(deadline=None)
@given(drawn=rewards_and_k)
def test_pkpo_against_its_definition(drawn):
    rewards, k = drawn
    n, plain = len(rewards), rewards.tolist()
    s = naive_s(plain, k)
    assert pkpo_s(rewards, k) == pytest.approx(s)
    if k < n:
        sloo = [s[i] - k / (n - 1) * mean_best(without(plain, i), k) for i in range(n)]
        assert pkpo_sloo(rewards, k) == pytest.approx(sloo, abs=1e-9)
    if k > 1:
        sloo1 = [s[i] - k / n * mean_best(without(plain, i), k - 1) for i in range(n)]
        assert pkpo_sloo1(rewards, k) == pytest.approx(sloo1, abs=1e-9)


@settings(deadline=None)
@given(drawn=rewards_and_k)
def test_pkpo_properties(drawn):
    rewards, k = drawn
    n = len(rewards)
    assert pkpo_s(rewards, k).sum() == pytest.approx(k * mean_best(rewards.tolist(), k))
    assert n * pkpo_sloo1(rewards, 1) == pytest.approx(n / (n - 1) * (rewards - rewards.mean()), abs=1e-9)
    lead = np.where(np.arange(n) == np.argmax(rewards), np.sort(rewards)[-1] - np.sort(rewards)[-2], 0.0)
    assert top2(rewards) == pytest.approx(lead)
    if k > 1:
        assert (pkpo_sloo1(rewards, k) >= 0.0).all()
        assert (pkpo_sloo1(rewards, k)[rewards == rewards.min()] == 0.0).all(), "the worst adds nothing, exactly"


@settings(deadline=None)
@given(c=st.integers(0, 7), n=st.integers(2, 7), k=st.integers(1, 7))
def test_chen_against_its_definition(c, n, k):
    """The reward of a subset is 1 if one of its k members succeeds. A sample gets the mean advantage of the subsets
    that contain it."""
    rewards, k = successes(min(c, n), n), min(k, n)
    subsets = [(s, max(rewards[list(s)])) for s in itertools.combinations(range(n), k)]
    mean = statistics.mean(best for _, best in subsets)
    differences = [statistics.mean(best - mean for s, best in subsets if i in s) for i in range(n)]
    assert chen_differences(rewards, k) == pytest.approx(differences, abs=1e-9)
    sigma = statistics.pstdev(best for _, best in subsets)
    assert chen(rewards, k) == pytest.approx([d / (sigma + 1e-6) for d in differences], abs=1e-7)


@pytest.mark.parametrize("k", [2, 512, 1023, 1024])
def test_groups_of_a_thousand_are_exact(k):
    """Binomials of 1024 have 307 digits. They are computed as integers, for every k."""
    n, c = 1024, 3
    rewards = successes(c, n)
    # A success adds something where the k-1 others of the subset are failures.
    alone = Fraction(k, n) * Fraction(math.comb(n - c, k - 1), math.comb(n - 1, k - 1))
    assert pkpo_sloo1(rewards, k) == pytest.approx([float(alone)] * c + [0.0] * (n - c), rel=1e-9)
    assert pkpo_s(rewards, k).sum() == pytest.approx(k * pass_at_k(n, c, k), rel=1e-9)
    assert np.isfinite(chen(rewards, k)).all()
    if k < n:
        total = math.fsum(pkpo_sloo(rewards, k))
        by_group = c * pass_at_k(n - 1, c - 1, k) + (n - c) * pass_at_k(n - 1, c, k)
        assert total == pytest.approx(k * pass_at_k(n, c, k) - k / (n - 1) * by_group, abs=1e-9)


# ---- the gradient: n samples succeed with probability p each; d log pi / dp is 1/p or -1/(1-p)


def gradient_of(weigh, n, k, p=0.3):
    """Return expectation and variance of Σ_i w_i d log pi(x_i) / dp, over all outcomes of n samples."""
    first = second = 0.0
    for drawn in itertools.product((0.0, 1.0), repeat=n):
        chance = math.prod(p if x else 1 - p for x in drawn)
        estimate = sum(
            w * (1 / p if x else -1 / (1 - p)) for w, x in zip(weigh(np.array(drawn), k), drawn, strict=True)
        )
        first, second = first + chance * estimate, second + chance * estimate**2
    return first, second - first**2


def slope(k, p=0.3):
    """Return d pass@k / dp for pass@k = 1 - (1-p)^k."""
    return k * (1 - p) ** (k - 1)


@pytest.mark.parametrize(
    ("weigh", "n", "k", "expected", "variance"),
    [
        (pkpo_s, 4, 2, 1.400, 1.662),
        (pkpo_sloo, 4, 2, 1.400, 2.057),
        (pkpo_sloo1, 4, 2, 1.400, 0.700),
        (chen_differences, 4, 2, 1.400, 1.04),
        (lambda rewards, k: top2(rewards), 4, 2, 1.372, 2.69),
        (pkpo_s, 5, 3, 1.470, 3.053),
        (pkpo_sloo, 5, 3, 1.470, 3.047),
        (pkpo_sloo1, 5, 3, 1.470, 0.647),
        (chen_differences, 5, 3, 0.980, 0.63),
        (lambda rewards, k: 1.5 * chen_differences(rewards, k), 5, 3, 1.470, 1.41),
        (lambda rewards, k: top2(rewards), 5, 3, 1.2005, 2.56),
    ],
)
def test_expectation_and_variance_worked(weigh, n, k, expected, variance):
    mean, spread = gradient_of(weigh, n, k)
    digits = len(str(variance).partition(".")[2])
    assert mean == pytest.approx(expected, abs=1e-9)
    assert spread == pytest.approx(variance, abs=0.6 * 10**-digits)


@pytest.mark.parametrize(("n", "k"), [(n, k) for n in range(2, 7) for k in range(1, n + 1)])
def test_what_each_estimator_is_the_gradient_of(n, k):
    assert gradient_of(pkpo_s, n, k)[0] == pytest.approx(slope(k))
    assert gradient_of(pkpo_sloo1, n, k)[0] == pytest.approx(slope(k))
    assert gradient_of(chen_differences, n, k)[0] == pytest.approx((n - k) / k * slope(k), abs=1e-12)
    assert gradient_of(lambda rewards, k: top2(rewards), n, k)[0] == pytest.approx(slope(n))
    if k < n:
        assert gradient_of(pkpo_sloo, n, k)[0] == pytest.approx(slope(k))


@pytest.mark.parametrize("name", ["pkpo_sloo1", "pkpo_sloo"])
def test_the_mean_over_the_group_of_the_advantages_has_the_gradient(name):
    def of_the_mean(drawn, k):
        return [a / len(drawn) for a in flat(advantages([[x] for x in drawn.tolist()], **passk(name, k)))]

    assert gradient_of(of_the_mean, 4, 3)[0] == pytest.approx(slope(3))


# ---- the estimator


def test_pkpo_with_k_1_is_rloo():
    rewards = [[1.0, 0.0], [0.25], [0.0], [-2.0, 0.5]]
    ours, rloo = advantages(rewards, **passk("pkpo_sloo1", 1)), advantages(rewards, "rloo")
    assert flat(ours) == pytest.approx(flat(rloo))


def test_pkpo_is_multiplied_by_the_group_and_the_published_advantages_are_not():
    rewards = [[x] for x in BINARY.tolist()]
    assert flat(advantages(rewards, **passk("pkpo_sloo1", 2))) == pytest.approx(4 * pkpo_sloo1(BINARY, 2))
    assert flat(advantages(rewards, **passk("pkpo_sloo", 2))) == pytest.approx(4 * pkpo_sloo(BINARY, 2))
    assert flat(advantages(rewards, **passk("chen", 2))) == pytest.approx(chen(BINARY, 2))
    graded = [[x] for x in GRADED.tolist()]
    assert flat(advantages(graded, **passk("top2", 99))) == pytest.approx(top2(GRADED)), "it has no k"


def test_groups_of_different_sizes_are_computed_separately():
    config = AlgorithmConfig(advantage_method="grpo_passk", passk=PassKConfig(k=2))
    batch = [[[1.0], [0.0], [0.5]], [[0.0], [1.0]], [[0.2], [0.0], [0.9]], [[1.0], [1.0], [0.0], [0.0]]]
    assert batch_advantages(batch, config) == [batch_advantages([group], config)[0] for group in batch]


def test_turns_of_a_trajectory_share_its_advantage():
    first, _ = advantages([[0.25, 0.5, 0.25], [0.0]], **passk("pkpo_sloo1", 2))
    assert first == [2.0, 2.0, 2.0]  # n x (k/n) x lead


@pytest.mark.parametrize(
    ("estimator", "k", "message"),
    [
        ("best", 2, "algorithm.passk.estimator=best is not known; choose one of pkpo_sloo1, pkpo_sloo, chen, top2"),
        ("pkpo_sloo1", 4, "algorithm.passk.k=4 must be from 1 to 3 for a group of 3 .* or algorithm.group_size"),
        ("pkpo_sloo1", 0, "algorithm.passk.k=0 must be from 1 to 3"),
        ("pkpo_sloo", 3, "algorithm.passk.k=3 must be from 1 to 2 .* algorithm.passk.estimator=pkpo_sloo"),
        ("chen", 4, "algorithm.passk.k=4 must be from 1 to 3"),
        ("chen", 2, "algorithm.passk.estimator=chen needs .* exactly 0 or 1 and got 0.5; set .*=pkpo_sloo1"),
    ],
)
def test_invalid_settings_and_rewards_are_errors(estimator, k, message):
    with pytest.raises(UserError, match=message):
        advantages([[1.0], [0.0], [0.5]], **passk(estimator, k))
