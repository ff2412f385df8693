"""Estimators: worked numbers of the reference implementations, textbook definitions, unbiasedness by enumeration."""

import itertools
import math
import statistics

import pytest
from groups import advantages, batch_advantages, flat, group, make_group, shape
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mtrl.algorithms.advantages import estimate, turn_advantages
from mtrl.algorithms.batch import CreditBatch
from mtrl.config.algorithm_schema import AlgorithmConfig
from mtrl.config.schema import RewardConfig
from mtrl.errors import UserError
from mtrl.rewards.compose import RewardComposer

OUTCOMES = [[1.0], [0.0], [0.0], [1.0]]
LENGTHS = [[2], [3], [1], [4]]
gammas = st.sampled_from([1.0, 0.9, 0.0])


def close(a, b, tolerance=1e-6):
    assert shape(a) == shape(b)
    assert flat(a) == pytest.approx(flat(b), abs=tolerance)


# ---- worked numbers: rewards 1, 0, 0, 1 of 2, 3, 1 and 4 tokens, measured in verl and prime-rl


def test_grpo_worked():
    close(advantages(OUTCOMES, "grpo"), [[0.866024], [-0.866024], [-0.866024], [0.866024]])
    assert advantages(OUTCOMES, "group_based") == advantages(OUTCOMES, "grpo")


def test_dr_grpo_worked():
    close(advantages(OUTCOMES, "dr_grpo"), [[0.5], [-0.5], [-0.5], [0.5]])


def test_rloo_worked():
    close(advantages(OUTCOMES, "rloo"), [[0.666667], [-0.666667], [-0.666667], [0.666667]])


def test_maxrl_worked():
    close(advantages(OUTCOMES, "maxrl"), [[1.0], [-1.0], [-1.0], [1.0]])


def test_opo_worked():
    close(advantages(OUTCOMES, "opo", LENGTHS), [[0.4], [-0.6], [-0.6], [0.4]])


@pytest.mark.parametrize(
    "method",
    ["reinforce_pp", "reinforce_plus_plus", "reinforce_pp_baseline", "reinforce_plus_plus_baseline"],
)
def test_reinforce_pp_worked(method):
    close(advantages(OUTCOMES, method, LENGTHS), [[0.774597], [-1.161895], [-1.161895], [0.774597]])


def test_gpg_worked():
    """Two of four trajectories have a reward, so alpha is 2. In a batch with another group without rewards alpha is
    4."""
    close(advantages(OUTCOMES, "gpg"), [[1.0], [-1.0], [-1.0], [1.0]])
    both = batch_advantages([OUTCOMES, [[0.0]] * 4], AlgorithmConfig(advantage_method="gpg"))
    close(both, [[[2.0], [-2.0], [-2.0], [2.0]], [[0.0]] * 4])
    assert advantages([[1.0], [0.1, 0.2, -0.3], [0.0]], "gpg")[0] == [pytest.approx(2.0)], "5.6e-17 was not earned"


def test_grpo_of_one_success_in_eight_sums_to_zero():
    """If the standard deviation also left the trajectory out, the result would be [1, -0.378 x 7], which sums to
    -1.646."""
    values = flat(advantages([[1.0]] + [[0.0]] * 7))
    assert values == pytest.approx([2.475] + [-0.3536] * 7, abs=1e-3)
    assert sum(values) == pytest.approx(0.0, abs=1e-12)


def test_maxrl_of_a_rare_success_is_large_and_of_no_success_is_zero():
    close(advantages([[1.0], [0.0], [0.0], [0.0]], "maxrl"), [[3.0], [-1.0], [-1.0], [-1.0]])
    assert advantages([[0.0], [-1.0], [0.0]], "maxrl") == [[0.0]] * 3, "a mean below 0 says nothing"
    assert 0.1 + 0.2 > 0.3, "the example must be one where rounding differs"
    assert advantages([[0.1, 0.2], [-0.3]], "maxrl") == [[0.0, 0.0], [0.0]], "nor one that is rounding"


def test_per_turn_worked():
    rewards = [[0.2, 1.0], [0.0], [0.2, 0.0], [0.1, 1.0]]
    expected = [[0.766667, 0.5], [-0.833333], [-0.566667, -1.0], [0.633333, 0.5]]
    close(advantages(rewards, "group_based_per_turn"), expected)
    close(advantages(rewards, "rloo", credit="turn"), expected)


def test_mt_grpo_worked():
    rewards = [[0.2, 1.0], [0.0, 0.0], [0.2, 0.0], [0.1, 1.0]]
    expected = [[1.64841, 0.86588], [-2.1701, -0.86588], [-0.08334, -0.86588], [0.60503, 0.86588]]
    close(advantages(rewards, "mt_grpo"), expected, 1e-5)
    turn_only = [0.78253, -1.30422, 0.78253, -0.26084]
    halved = advantages(rewards, "mt_grpo", turn_advantage_coef=0.5)
    assert [first - last for first, last in halved] == pytest.approx([a / 2 for a in turn_only], abs=1e-5)


@pytest.mark.parametrize("method", ["rloo", "dr_grpo", "grpo", "maxrl"])
def test_turn_and_outcome_with_only_a_final_reward_equals_credit_for_the_trajectory(method):
    """`reward.level=trajectory` leaves no turn rewards, so the discount and the coefficient of turns have no effect."""
    group = make_group([[0.2, 1.0], [0.0], [0.2, 0.0], [0.1, 0.3, 1.0]])
    RewardComposer(RewardConfig(level="trajectory")).apply(group)
    assert [turn.reward for turn in group.trajectories[3].turns] == [0.0, 0.0, 1.4]
    whole, both = (
        turn_advantages([group], AlgorithmConfig(advantage_method=method, credit=credit, **more))
        for credit, more in (("trajectory", {}), ("turn+outcome", {"gamma": 0.9, "turn_advantage_coef": 0.5}))
    )
    assert both == whole
    assert flat(whole) != [0.0] * 8


def test_a_turn_that_no_peer_reached_gets_advantage_0():
    assert advantages([[0.0, 0.0, 5.0], [1.0]], "group_based_per_turn") == [[4.0, 0.0, 0.0], [-4.0]]


def test_gamma_discounts_per_turn():
    close(advantages([[0.0, 0.0, 1.0]], "monte_carlo", gamma=0.9), [[0.81, 0.9, 1.0]])
    rewards = [[0.0, 1.0], [0.0, 0.0]]
    close(advantages(rewards, "group_based_per_turn", gamma=0.5), [[0.5, 1.0], [-0.5, -1.0]])


# ---- equal rewards

COMPARED = [(method, {}) for method in ("grpo", "dr_grpo", "rloo", "maxrl", "opo", "gpg", "group_based_per_turn")]
COMPARED += [("grpo", {"norm_by_std": False}), ("grpo", {"credit": "turn"}), ("rloo", {"credit": "turn+outcome"})]
COMPARED += [("mt_grpo", {}), ("gigpo", {})]


@settings(deadline=None)
@given(turns=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=4), size=st.integers(1, 9))
def test_equal_rewards_give_exactly_zero(turns, size):
    """The rewards are any floats, and a group can have one member. The mean of n equal floats need not equal that
    float."""
    for method, more in COMPARED:
        assert advantages([turns] * size, method, **more) == [[0.0] * len(turns)] * size, method


@pytest.mark.parametrize("method", ["grpo", "rloo", "opo", "reinforce_pp_baseline", "grpo_passk"])
def test_rewards_that_differ_only_by_rounding_are_equal(method):
    parts = [[0.1, 0.2, 0.3], [0.3, 0.2, 0.1], [0.3, 0.1, 0.2], [0.2, 0.3, 0.1]]
    assert (0.1 + 0.2) + 0.3 != (0.3 + 0.2) + 0.1, "the example must be one where rounding differs"
    assert advantages(parts, method) == [[0.0] * 3] * 4
    assert advantages([[1.0], [1.0 + 2**-52], [1.0], [1.0]], method) == [[0.0]] * 4


@pytest.mark.parametrize(
    ("method", "credit"),
    [
        *itertools.product(("grpo", "dr_grpo", "rloo", "maxrl", "gpg"), ("trajectory", "turn")),
        *itertools.product(("reinforce_pp", "reinforce_pp_baseline", "opo", "gdpo", "grpo_passk"), ("trajectory",)),
    ],
)
def test_rewards_that_cancel_are_equal_to_zero(method, credit):
    """The sum 0.1 + 0.2 - 0.3 is 5.6e-17 or 2.8e-17, depending on the order, while its terms are about 0.3."""
    cancelling = [[0.1, 0.2, -0.3], [-0.3, 0.2, 0.1], [0.2, -0.3, 0.1], [0.0, 0.0, 0.0]]
    assert len({sum(turns) for turns in cancelling}) > 1, "the example must be one where rounding differs"
    first = [turns[0] for turns in advantages(cancelling, method, credit=credit)]
    assert first == [0.0] * 4


# ---- independent implementations: naive loops


@settings(deadline=None)
@given(rewards=group)
def test_grpo_against_the_textbook(rewards):
    outcomes = [sum(turns) for turns in rewards]
    assume(len(set(outcomes)) > 1)
    mean, std = statistics.mean(outcomes), statistics.stdev(outcomes)
    expected = [[(r - mean) / (std + 1e-6)] * len(t) for r, t in zip(outcomes, rewards, strict=True)]
    close(advantages(rewards, "grpo"), expected, 1e-7)


@settings(deadline=None)
@given(rewards=group, data=st.data())
def test_baselines_against_the_textbook(rewards, data):
    tokens = [[data.draw(st.integers(0, 5)) for _ in turns] for turns in rewards]
    n, outcomes, lengths = len(rewards), [sum(turns) for turns in rewards], [sum(counts) for counts in tokens]
    mean = statistics.mean(outcomes)
    weighted = sum(length * r for length, r in zip(lengths, outcomes, strict=True)) / max(sum(lengths), 1)
    alpha = n / max(sum(r != 0.0 for r in outcomes), 1)
    others = [[r for j, r in enumerate(outcomes) if j != i] for i in range(n)]
    expected = {
        "dr_grpo": [r - mean for r in outcomes],
        "rloo": [r - statistics.mean(o) if o else 0.0 for r, o in zip(outcomes, others, strict=True)],
        "maxrl": [(r - mean) / mean if mean > 0 else 0.0 for r in outcomes],
        "opo": [r - weighted if sum(lengths) and n > 1 else 0.0 for r in outcomes],
        "gpg": [alpha * (r - mean) for r in outcomes],
    }
    for method, values in expected.items():
        nested = [[value] * len(turns) for value, turns in zip(values, rewards, strict=True)]
        close(advantages(rewards, method, tokens), nested, 1e-9)


def to_go(turns, start, gamma):
    return sum(gamma ** (s - start) * turns[s] for s in range(start, len(turns)))


@settings(deadline=None)
@given(rewards=group, gamma=gammas)
def test_per_turn_against_its_definition(rewards, gamma):
    expected = []
    for i, turns in enumerate(rewards):
        expected.append([])
        for t in range(len(turns)):
            peers = [to_go(other, t, gamma) for j, other in enumerate(rewards) if j != i and len(other) > t]
            expected[-1].append(to_go(turns, t, gamma) - statistics.mean(peers) if peers else 0.0)
    close(advantages(rewards, "group_based_per_turn", gamma=gamma), expected, 1e-9)


@settings(deadline=None)
@given(rewards=group, gamma=gammas)
def test_monte_carlo_against_its_definition(rewards, gamma):
    expected = [[to_go(turns, t, gamma) for t in range(len(turns))] for turns in rewards]
    close(advantages(rewards, "monte_carlo", gamma=gamma), expected, 1e-9)
    whole = [[sum(turns)] * len(turns) for turns in rewards]
    close(advantages(rewards, "monte_carlo", gamma=gamma, credit="trajectory"), whole, 1e-9)


def z_scores(values, epsilon):
    if len(set(values)) == 1:
        return [0.0] * len(values)
    return [(v - statistics.mean(values)) / (statistics.stdev(values) + epsilon) for v in values]


@settings(deadline=None)
@given(rewards=group, gamma=gammas, coefficient=st.sampled_from([1.0, 0.5]))
def test_mt_grpo_against_its_definition(rewards, gamma, coefficient):
    """In the comparison of turn rewards, a last turn and a turn that was not reached count as 0."""
    longest = max(map(len, rewards))
    columns = [[turns[t] if t < len(turns) - 1 else 0.0 for turns in rewards] for t in range(longest)]
    by_turn = list(zip(*(z_scores(column, 1e-4) for column in columns), strict=True))
    outcome = z_scores([turns[-1] for turns in rewards], 1e-4)
    expected = [
        [outcome[i] + coefficient * to_go(by_turn[i], t, gamma) for t in range(len(turns))]
        for i, turns in enumerate(rewards)
    ]
    close(advantages(rewards, "mt_grpo", gamma=gamma, turn_advantage_coef=coefficient), expected, 1e-7)


# ---- unbiasedness: an episode continues after turn 1 with probability p; turn 2 has the reward 1 with probability q


def expected_gradient(estimate, n, p, q, first=0.3, after=()):
    """Return E[1/n Σ_i Σ_t A_it d log pi / d(p, q)] over all outcomes of n episodes. Turn 1 has the reward `first` in
    any case. Turns without a choice follow turn 2; their rewards are `after`."""
    episodes = [  # probability, rewards, score function per turn as (d/dp, d/dq)
        (1 - p, [first], [(-1 / (1 - p), 0.0)]),
        (p * q, [first, 1.0, *after], [(1 / p, 0.0), (0.0, 1 / q)]),
        (p * (1 - q), [first, 0.0, *after], [(1 / p, 0.0), (0.0, -1 / (1 - q))]),
    ]
    gradient = [0.0, 0.0]
    for drawn in itertools.product(episodes, repeat=n):
        chance = math.prod(episode[0] for episode in drawn)
        advantages = estimate([episode[1] for episode in drawn])
        for turns, (_, _, scores) in zip(advantages, drawn, strict=True):
            for a, score in zip(turns, scores, strict=False):
                for parameter in (0, 1):
                    gradient[parameter] += chance / n * a * score[parameter]
    return gradient


def by(method, **settings):
    return lambda rewards: advantages(rewards, method, **settings)


CERTAIN = 1 - 1e-12
"""Rewards of the process of verl#7244: turn 2 has the reward 1, so J = p and dJ/dp = 1."""


@pytest.mark.parametrize("p", [0.2, 0.5, 0.9])
@pytest.mark.parametrize("n", [2, 3, 4])
def test_per_turn_is_unbiased_on_the_toy_mdp(n, p):
    """The first turn has all peers and the second has no choice, so no turn without peers reduces the gradient."""
    gradient = expected_gradient(by("group_based_per_turn"), n, p, CERTAIN, first=0.0)
    assert gradient[0] == pytest.approx(1.0, abs=1e-9)


def test_per_turn_gradient_of_a_stochastic_second_turn():
    """dJ/dp = q is exact. dJ/dq = p is multiplied by the probability that a peer reached turn 2, because without a peer
    there is no baseline."""
    n, p, q = 3, 0.4, 0.7
    gradient = expected_gradient(by("group_based_per_turn"), n, p, q)
    assert gradient[0] == pytest.approx(q)
    assert gradient[1] == pytest.approx(p * (1 - (1 - p) ** (n - 1)))


def test_rloo_is_unbiased_and_dr_grpo_shrinks_by_n_minus_1_over_n():
    n, p, q = 4, 0.4, 0.7
    assert expected_gradient(by("rloo"), n, p, q) == pytest.approx([q, p])
    assert expected_gradient(by("dr_grpo"), n, p, q) == pytest.approx([q * 3 / 4, p * 3 / 4])
    assert expected_gradient(by("monte_carlo"), n, p, q) == pytest.approx([q, p])
    assert expected_gradient(by("monte_carlo", credit="trajectory"), n, p, q) == pytest.approx([q, p])


@pytest.mark.parametrize("after", [(), (0.0,)], ids=["paid as the outcome", "paid as a turn reward"])
def test_turn_and_outcome_credits_the_decision_to_continue(after):
    """A trajectory that stopped counts as 0 in the comparison at turn 2 and gets the credit for it at turn 1."""
    n, p = 4, 0.4
    toy = {"n": n, "p": p, "q": CERTAIN, "first": 0.0, "after": after}
    assert expected_gradient(by("rloo", credit="turn+outcome"), **toy)[0] == pytest.approx(1.0, abs=1e-9)
    difference = expected_gradient(by("dr_grpo", credit="turn+outcome"), **toy)[0]
    assert difference == pytest.approx((n - 1) / n, abs=1e-9)
    mt_grpo = expected_gradient(by("mt_grpo", norm_by_std=False), **toy)[0]
    assert mt_grpo == pytest.approx(difference, abs=1e-12)


def centred_by_turn_index(rewards):
    """Subtract the mean over the trajectories that reached the turn. mtrl does not use this form, because it is
    biased."""
    columns = {t: [r[t] for r in rewards if len(r) > t] for t in range(max(map(len, rewards)))}
    return [[r[t] - statistics.mean(columns[t]) for t in range(len(r))] for r in rewards]


def summed_to_go(rewards):
    return [[to_go(turns, t, 1.0) for t in range(len(turns))] for turns in centred_by_turn_index(rewards)]


@pytest.mark.parametrize("biased", [centred_by_turn_index, summed_to_go])
def test_the_enumeration_shows_the_bias_of_the_naive_forms(biased):
    """The immediate reward alone, and rewards that are normalised per turn index before they are summed, have an
    expected gradient of 0."""
    assert expected_gradient(biased, 3, 0.4, CERTAIN, first=0.0)[0] == pytest.approx(0.0, abs=1e-9)


# ---- the helper


def one_per_trajectory(batch, config):
    return batch.outcomes


def not_finite(batch, config):
    return batch.broadcast(batch.outcomes * math.nan)


def test_turn_advantages_uses_the_method_of_the_config():
    groups = [make_group([[0.0, 1.0], [0.5]]), make_group([[2.0], [0.0]])]
    values = turn_advantages(groups, AlgorithmConfig(advantage_method="rloo"))
    assert values == [[[0.5, 0.5], [-0.5]], [[2.0], [-2.0]]]


@pytest.mark.parametrize("function", [one_per_trajectory, not_finite])
def test_an_invalid_result_of_a_users_estimator_is_an_error_that_names_it(function):
    config = AlgorithmConfig(advantage_method=f"{__name__}.{function.__name__}")
    with pytest.raises(ValueError, match=f"{function.__name__} returned"):
        estimate(CreditBatch.of([make_group([[0.0, 1.0], [0.5]])]), config)


@pytest.mark.parametrize(
    ("method", "credit", "choices"),
    [
        ("opo", "turn", "choose trajectory or null"),
        ("group_based_per_turn", "trajectory", "choose turn or null"),
        ("mt_grpo", "turn", "choose turn\\+outcome or null"),
        ("gigpo", "turn", "choose null"),
        ("grpo", "token", "choose trajectory or turn or turn\\+outcome or null"),
    ],
)
def test_an_unsupported_credit_is_an_error(method, credit, choices):
    with pytest.raises(UserError, match=f"algorithm.credit={credit} .*{method}; {choices}"):
        advantages([[0.0], [1.0]], method, credit=credit)
