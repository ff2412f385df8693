"""Intervals and tests: published values, brute force, and coverage by simulation."""

import itertools
import random
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtrl.scoring.statistics import compare, holm, mcnemar, mean_difference, mean_rate, ranking, success_rate, wilson


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [  # Newcombe 1998, Statistics in Medicine 17, table I, method 3
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_as_published(successes, trials, low, high):
    assert wilson(successes, trials) == pytest.approx((low, high), abs=5e-5)


@given(trials=st.integers(1, 400), data=st.data(), level=st.sampled_from([0.8, 0.95, 0.99]))
def test_wilson_solves_its_equation(trials, data, level):
    """The ends of the interval are the rates p whose z-score, with the true standard error, is the quantile."""
    from statistics import NormalDist

    successes = data.draw(st.integers(0, trials))
    z = NormalDist().inv_cdf((1 + level) / 2)
    low, high = wilson(successes, trials, level)
    rate = successes / trials
    assert 0 <= low <= rate <= high <= 1
    for end in (low, high):
        assert (rate - end) ** 2 == pytest.approx(z * z * end * (1 - end) / trials, abs=1e-9)


def test_a_level_close_to_one_has_an_interval():
    low, high = wilson(3, 10, 0.9999999999999999)
    assert 0 < low < wilson(3, 10, 0.999999)[0] and wilson(3, 10, 0.999999)[1] < high < 1


def test_wilson_is_symmetric_and_narrows():
    low, high = wilson(3, 10)
    assert wilson(7, 10) == pytest.approx((1 - high, 1 - low))
    assert wilson(30, 100)[0] > low and wilson(30, 100)[1] < high
    assert wilson(3, 10, 0.99)[0] < low and wilson(3, 10, 0.8)[0] > low


@pytest.mark.parametrize("arguments", [(0, 0), (2, 1), (-1, 3), (1, 2, 0.0), (1, 2, 1.0)])
def test_wilson_refuses_nonsense(arguments):
    with pytest.raises(ValueError, match="no interval"):
        wilson(*arguments)


@given(outcomes=st.lists(st.booleans(), min_size=1, max_size=60))
def test_one_sample_per_prompt_is_plain_wilson(outcomes):
    rate = success_rate([[float(outcome)] for outcome in outcomes])
    assert (rate.low, rate.high) == pytest.approx(wilson(sum(outcomes), len(outcomes)), abs=1e-12)
    assert rate.effective_samples == len(outcomes)


def test_samples_that_repeat_their_prompt_add_nothing():
    """Eight identical samples of each prompt are worth one."""
    prompts = [1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0]
    assert success_rate([[outcome] * 8 for outcome in prompts]) == success_rate([[outcome] for outcome in prompts])


def test_independent_samples_count_in_full():
    """If prompts do not differ, there are as many trials as samples, and never more."""
    alike = [[1.0, 0.0] * 4] * 10
    assert success_rate(alike).effective_samples == 10  # no spread at all between prompts: not known, so cautious
    rng = random.Random(3)
    rate = success_rate([[float(rng.random() < 0.5) for _ in range(8)] for _ in range(200)])
    assert 1300 < rate.effective_samples <= 1600


def test_the_mean_is_over_prompts_not_samples():
    assert success_rate([[1.0], [0.0, 0.0, 0.0]]).value == 0.5


@pytest.mark.parametrize("outcome", [0.0, 1.0])
def test_equal_samples_still_have_an_interval(outcome):
    rate = success_rate([[outcome] * 16] * 5)
    assert rate.value == outcome
    assert (rate.low, rate.high) == wilson(5 * outcome, 5)
    assert rate.high - rate.low > 0.3


def test_pass_at_k_values_get_a_narrower_interval_than_their_worst_case():
    values = [0.4, 0.5, 0.6, 0.5, 0.45, 0.55, 0.5, 0.52, 0.48, 0.5]
    cautious, trusting = mean_rate(values, samples=len(values)), mean_rate(values, samples=80)
    assert cautious.value == trusting.value == pytest.approx(fmean(values))
    assert cautious.effective_samples == 10 and trusting.effective_samples == 80
    assert trusting.high - trusting.low < 0.5 * (cautious.high - cautious.low)


@pytest.mark.parametrize("outcomes", [[], [[]], [[1.0], []], [[2.0]], [[-0.1]], [[float("nan")]]])
def test_rates_refuse_nonsense(outcomes):
    with pytest.raises(ValueError):
        success_rate(outcomes)


def coverage(interval, runs=400, prompts=60, samples=8):
    """Return the share of simulated evaluations whose interval holds 0.3, on easy (0.9) and hard (0.1) prompts."""
    rng = random.Random(0)
    held = 0
    for _ in range(runs):
        rates = [0.9 if rng.random() < 0.25 else 0.1 for _ in range(prompts)]
        low, high = interval([[float(rng.random() < p) for _ in range(samples)] for p in rates])
        held += low <= 0.3 <= high
    return held / runs


def test_the_clustered_interval_covers_and_the_naive_one_does_not():
    def clustered(outcomes):
        rate = success_rate(outcomes)
        return rate.low, rate.high

    def naive(outcomes):
        return wilson(sum(map(sum, outcomes)), sum(map(len, outcomes)))

    assert 0.92 <= coverage(clustered) <= 0.985
    assert coverage(naive) < 0.75


# ---- paired tests


@given(wins=st.integers(0, 6), losses=st.integers(0, 6))
def test_mcnemar_against_all_coin_tosses(wins, losses):
    changed = wins + losses
    tosses = [sum(toss) for toss in itertools.product((0, 1), repeat=changed)]
    extreme = fmean(abs(2 * heads - changed) >= abs(wins - losses) for heads in tosses)
    assert mcnemar(wins, losses) == pytest.approx(extreme)


def test_mcnemar_known_values():
    assert mcnemar(0, 0) == 1.0
    assert mcnemar(0, 5) == 2 / 32
    assert mcnemar(10, 2) == pytest.approx(0.038574, abs=1e-6)
    assert mcnemar(3000, 2000) < 1e-40


def test_compare_counts_prompts():
    paired = compare([0.0, 1.0, 0.5, 0.0, 1.0], [1.0, 1.0, 0.75, 1.0, 0.0])
    assert (paired.wins, paired.losses, paired.ties) == (3, 1, 1)
    assert paired.difference == pytest.approx(0.25)
    assert paired.p_value == mcnemar(3, 1)
    swapped = compare([1.0, 1.0, 0.75, 1.0, 0.0], [0.0, 1.0, 0.5, 0.0, 1.0])
    assert (swapped.wins, swapped.difference, swapped.p_value) == (1, -paired.difference, paired.p_value)


@pytest.mark.parametrize(("first", "second"), [([], []), ([1.0], [1.0, 0.0])])
def test_compare_needs_pairs(first, second):
    with pytest.raises(ValueError, match="cannot be paired"):
        compare(first, second)


def test_the_interval_of_a_difference_as_published():
    """The formula of Bonett and Price for the discordant counts, with 40 pairs of which 2 and 12 changed."""
    differences = [1.0] * 12 + [-1.0] * 2 + [0.0] * 26
    won, lost = 13 / 42, 3 / 42
    half = 1.959964 * ((won + lost - (won - lost) ** 2) / 42) ** 0.5
    found = mean_difference(differences)
    assert (found.value, found.low, found.high) == pytest.approx((0.25, won - lost - half, won - lost + half), abs=1e-6)


@given(differences=st.lists(st.sampled_from([-1.0, -0.25, 0.0, 0.5, 1.0]), min_size=1, max_size=40))
def test_the_interval_of_a_difference_is_symmetric_and_holds_the_value(differences):
    found, swapped = mean_difference(differences), mean_difference([-d for d in differences])
    assert -1 <= found.low <= found.value <= found.high <= 1
    assert (swapped.low, swapped.high) == pytest.approx((-found.high, -found.low))
    assert mean_difference(differences, 0.5).high - mean_difference(differences, 0.5).low <= found.high - found.low


def test_no_change_is_no_proof_of_equality():
    few, many = mean_difference([0.0] * 5), mean_difference([0.0] * 500)
    assert few.low < -0.2 < 0.2 < few.high
    assert -0.01 < many.low < 0 < many.high < 0.01


@pytest.mark.parametrize("arguments", [([],), ([1.5],), ([float("nan")],), ([0.0], 1.0)])
def test_a_difference_refuses_nonsense(arguments):
    with pytest.raises(ValueError, match="no interval"):
        mean_difference(*arguments)


def difference_coverage(draw, prompts, truth, runs=1500):
    """Return the share of simulated comparisons whose interval holds the true difference."""
    rng = random.Random(1)
    held = 0
    for _ in range(runs):
        found = mean_difference([draw(rng) for _ in range(prompts)])
        held += found.low <= truth <= found.high
    return held / runs


def binary(rng, better=0.2, worse=0.1):
    """Return one greedy episode per policy and prompt: the second policy is better on 20 % and worse on 10 %."""
    coin = rng.random()
    return 1.0 if coin < better else -1.0 if coin < better + worse else 0.0


def clustered(rng, samples=4):
    """Return rates of four samples each, on prompts that are easy or hard for both; the second policy is 0.1 better."""
    first = 0.8 if rng.random() < 0.5 else 0.1
    rates = [fmean(rng.random() < p for _ in range(samples)) for p in (first, first + 0.1)]
    return rates[1] - rates[0]


@pytest.mark.parametrize("prompts", [12, 60])
def test_the_interval_of_a_greedy_difference_covers(prompts):
    assert 0.935 <= difference_coverage(binary, prompts, 0.1) <= 0.985


@pytest.mark.parametrize("prompts", [20, 100])
def test_the_interval_of_a_sampled_difference_covers(prompts):
    """The interval may only be too wide."""
    assert difference_coverage(clustered, prompts, 0.1) >= 0.94


def test_the_interval_of_pass_at_k_covers():
    from mtrl.scoring.pass_at_k import pass_at_k

    rng, held, runs, samples, k = random.Random(2), 0, 600, 6, 3
    chances = [0.05, 0.6]
    truth = fmean(1 - (1 - p) ** k for p in chances)
    for _ in range(runs):
        rows = [sum(rng.random() < p for _ in range(samples)) for p in rng.choices(chances, k=50)]
        found = mean_rate([pass_at_k(samples, c, k) for c in rows], 50 * (samples // k))
        held += found.low <= truth <= found.high
    assert 0.93 <= held / runs <= 0.99


@pytest.mark.parametrize(
    ("p_values", "adjusted"),
    [
        ([], []),
        ([0.03], [0.03]),
        ([0.01, 0.04, 0.03], [0.03, 0.06, 0.06]),  # 3 x 0.01; 2 x 0.03; 0.04, but not below the one before
        ([0.9, 0.005, 0.5], [1.0, 0.015, 1.0]),
        ([0.02, 0.02], [0.04, 0.04]),
    ],
)
def test_holm_by_hand(p_values, adjusted):
    assert holm(p_values) == pytest.approx(adjusted)


@given(p_values=st.lists(st.floats(0, 1), min_size=1, max_size=8), level=st.floats(0.001, 0.5))
def test_holm_rejects_what_its_definition_rejects(p_values, level):
    """The definition rejects p-values in order while each is at most level / (number of those left)."""
    rejected = set()
    for rank, place in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        if (len(p_values) - rank) * p_values[place] > level:
            break
        rejected.add(place)
    assert {i for i, p in enumerate(holm(p_values)) if p <= level} == rejected


def test_holm_bounds_the_probability_of_any_false_finding():
    rng, runs = random.Random(4), 4000
    wrong = sum(min(holm([rng.random() for _ in range(5)])) <= 0.05 for _ in range(runs)) / runs
    assert 0.035 <= wrong <= 0.062
    naive = sum(min(rng.random() for _ in range(5)) <= 0.05 for _ in range(runs)) / runs
    assert naive > 0.18


@given(
    higher=st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=8),
    lower=st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=8),
)
def test_ranking_against_all_pairs(higher, lower):
    pairs = [(a > b) + 0.5 * (a == b) for a in higher for b in lower]
    assert ranking(higher, lower) == pytest.approx(fmean(pairs))


def test_ranking_needs_both():
    with pytest.raises(ValueError, match="both kinds"):
        ranking([1.0], [])
    with pytest.raises(ValueError, match="p-values"):
        holm([1.2])
