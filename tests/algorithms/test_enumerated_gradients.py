"""The expected gradient of each estimator, loss and correction against the true one, over all outcomes of a group.

The MDP has three turns. Turn t is right with probability p, by its own logit, and then has the reward `rewards[t]`; a
wrong turn ends the episode with a reward of 0. An episode is one of four kinds, and the order within a group does not
matter: a group of n = 8 has 165 outcomes with multinomial probabilities. Nothing is sampled.
experiments/estimators/README.md has the numbers.
"""

import itertools
import math
import re
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import pytest
import torch
from groups import make_group

from mtrl.algorithms.advantages import estimate
from mtrl.algorithms.batch import CreditBatch
from mtrl.algorithms.losses import TokenBatch
from mtrl.algorithms.registry import find_correction, find_loss
from mtrl.config.algorithm_schema import AlgorithmConfig
from mtrl.config.overrides import CONF

TURNS = 3
PER_TURN, AT_THE_END = (0.2, 0.2, 1.0), (0.0, 0.0, 1.0)
"""Rewards of right turns: for each turn, or only for the last one."""
STUDY = CONF.parent / "experiments" / "estimators" / "README.md"


@dataclass(frozen=True)
class Episode:
    chance: float
    rewards: list[float]
    right: list[bool]


def episodes(p, rewards):
    """Return the episodes with 0, 1, 2 and 3 right turns."""
    kinds = []
    for right in range(TURNS + 1):
        turns = range(min(right + 1, TURNS))
        chance = p**right * ((1 - p) if right < TURNS else 1.0)
        kinds.append(Episode(chance, [rewards[t] if t < right else 0.0 for t in turns], [t < right for t in turns]))
    return kinds


def scores(kinds, p):
    """Return [kinds, T], the derivative of the log-probability of each turn with respect to its logit."""
    table = np.zeros((len(kinds), TURNS))
    for row, kind in zip(table, kinds, strict=True):
        row[: len(kind.right)] = [1 - p if right else -p for right in kind.right]
    return table


def true_gradient(p, rewards):
    """Return the gradient [T] of the expected sum of rewards, E[Σ r ∇ log π]."""
    kinds = episodes(p, rewards)
    return sum(kind.chance * sum(kind.rewards) * row for kind, row in zip(kinds, scores(kinds, p), strict=True))


class Groups:
    """All groups of n episodes, as one batch."""

    def __init__(self, kinds, n):
        self.n, drawn = n, list(itertools.combinations_with_replacement(range(len(kinds)), n))
        counts = np.array([[group.count(kind) for kind in range(len(kinds))] for group in drawn])
        ways = [math.factorial(n) / math.prod(map(math.factorial, row)) for row in counts.tolist()]
        self.chances = np.array(ways) * np.prod(np.array([kind.chance for kind in kinds]) ** counts, axis=1)
        assert self.chances.sum() == pytest.approx(1.0, abs=1e-12)
        self.kind = np.array(drawn)
        """[groups, n]"""
        self.batch = CreditBatch.of([make_group([kinds[i].rewards for i in group]) for group in drawn])

    def moments(self, gradients):
        """Return the mean [T] of a gradient [groups, T] with one row per group, and the norm of its standard
        deviation."""
        mean = self.chances @ gradients
        return mean, math.sqrt((self.chances @ np.square(gradients - mean)).sum())


@dataclass(frozen=True)
class Compared:
    """An expected gradient and the true one."""

    expected: np.ndarray
    true: np.ndarray
    deviation: float

    @property
    def ratio(self):
        """[T] the expected gradient divided by the true one, per turn."""
        return self.expected / self.true

    @property
    def size(self):
        return float(np.linalg.norm(self.expected) / np.linalg.norm(self.true))

    @property
    def cosine(self):
        return float(self.expected @ self.true / np.linalg.norm(self.expected) / np.linalg.norm(self.true))

    @property
    def noise(self):
        """Standard deviation of the gradient of one group, divided by the norm of the expected gradient."""
        return self.deviation / float(np.linalg.norm(self.expected))

    @property
    def bias(self):
        return float(np.linalg.norm(self.expected - self.true) / np.linalg.norm(self.true))


@lru_cache
def all_groups(p, n, rewards):
    return Groups(episodes(p, rewards), n)


def compare(method, credit=None, p=0.1, n=8, rewards=PER_TURN, **settings):
    """Return the expectation of `1/n Σ_i Σ_t A_it ∇ log π_it` and the true gradient."""
    kinds, groups = episodes(p, rewards), all_groups(p, n, rewards)
    advantages = estimate(groups.batch, AlgorithmConfig(advantage_method=method, credit=credit, **settings))
    per_episode = advantages.reshape(*groups.kind.shape, -1) * scores(kinds, p)[groups.kind]
    expected, deviation = groups.moments(per_episode.mean(axis=1))
    return Compared(expected, true_gradient(p, rewards), deviation)


CASES = list(itertools.product([0.1, 0.3, 0.5, 0.9], [2, 3, 8], [PER_TURN, AT_THE_END, (1.0, 1.0, 1.0)]))


def test_the_true_gradient_is_that_of_the_expected_reward():
    """The gradient of the expected reward, by finite differences in each logit."""

    def value(logits):
        p = 1 / (1 + np.exp(-np.array(logits)))
        return sum(pay * reach for pay, reach in zip(PER_TURN, np.cumprod(p), strict=True))

    logit = math.log(0.3 / 0.7)
    for turn, slope in enumerate(true_gradient(0.3, PER_TURN)):
        moved = [[logit + step * (t == turn) for t in range(TURNS)] for step in (1e-5, -1e-5)]
        assert (value(moved[0]) - value(moved[1])) / 2e-5 == pytest.approx(slope, rel=1e-8)


# ---- unbiased estimators


@pytest.mark.parametrize(
    ("method", "credit"), [("rloo", "trajectory"), ("rloo", "turn+outcome"), ("monte_carlo", None)]
)
def test_exactly_unbiased_for_every_turn(method, credit):
    for p, n, rewards in CASES:
        assert compare(method, credit, p, n, rewards).ratio == pytest.approx(np.ones(TURNS), rel=1e-9), (
            p,
            n,
            rewards,
        )


@pytest.mark.parametrize("credit", ["trajectory", "turn+outcome"])
def test_dr_grpo_is_n_minus_1_over_n_of_it_for_every_turn(credit):
    for p, n, rewards in CASES:
        expected = np.full(TURNS, (n - 1) / n)
        assert compare("dr_grpo", credit, p, n, rewards).ratio == pytest.approx(expected, rel=1e-9), (
            p,
            n,
            rewards,
        )


@pytest.mark.parametrize(("method", "credit"), [("group_based_per_turn", None), ("rloo", "turn")])
def test_credit_of_turns_shrinks_each_depth_by_the_chance_that_a_peer_reaches_it(method, credit):
    for p, n, rewards in CASES:
        reached = p ** np.arange(TURNS)
        has_a_peer = 1 - (1 - reached) ** (n - 1)
        assert compare(method, credit, p, n, rewards).ratio == pytest.approx(has_a_peer, rel=1e-9), (
            p,
            n,
            rewards,
        )


def test_the_gradient_of_turn_credit_where_success_is_rare():
    """If all turns share one logit, the gradient is the sum over turns."""
    rare = compare("rloo", "turn", p=0.1, n=8, rewards=AT_THE_END)
    assert [round(x, 2) for x in rare.ratio] == [1.0, 0.52, 0.07]
    assert round(rare.size, 2) == 0.65 and round(rare.expected.sum() / rare.true.sum(), 2) == 0.53
    assert round(rare.cosine, 2) == 0.81


def test_turn_and_turn_plus_outcome_are_equal_for_episodes_of_one_length():
    """Every turn has all peers, and the comparison is linear."""
    drawn = np.random.default_rng(0).integers(-8, 9, size=(5, 4)) / 8
    batch = CreditBatch.of([make_group(drawn.tolist())])
    by_turn, both = (
        estimate(batch, AlgorithmConfig(advantage_method="rloo", credit=credit)) for credit in ("turn", "turn+outcome")
    )
    assert by_turn == pytest.approx(both)


def test_the_direction_of_grpo_is_close_to_that_of_the_true_gradient():
    """With an outcome of 0 or 1 the directions are equal; with turn rewards the division by the deviation changes the
    direction."""
    steps = (0.1, 0.3, 0.5, 0.7, 0.9)
    for p in steps:
        assert compare("grpo", p=p, rewards=AT_THE_END).cosine == pytest.approx(1.0, abs=1e-9)
    cosines = [round(compare("grpo", p=p).cosine, 3) for p in steps]
    assert cosines == [0.993, 0.951, 0.976, 1.0, 0.998]
    assert [round(compare("grpo", p=p).size, 1) for p in steps] == [9.3, 4.3, 2.1, 1.4, 1.5]
    by_turn = [round(compare("grpo", "turn", p=p, rewards=AT_THE_END).cosine, 2) for p in steps]
    assert by_turn == [0.68, 0.84, 0.95, 1.0, 1.0]


UNBIASED = {
    "trajectory": ("rloo", "trajectory"),
    "turn+outcome": ("rloo", "turn+outcome"),
    "no baseline": ("monte_carlo", None),
}


@pytest.mark.parametrize("rewards", [PER_TURN, (1.0, 1.0, 1.0)])
@pytest.mark.parametrize("p", [0.1, 0.3, 0.5])
def test_turn_plus_outcome_is_the_least_noisy_of_the_unbiased_up_to_a_half(p, rewards):
    noise = {name: compare(*which, p=p, rewards=rewards).noise for name, which in UNBIASED.items()}
    assert min(noise, key=noise.get) == "turn+outcome", noise


def test_above_a_half_no_baseline_is_less_noisy_here():
    """A wrong first turn has a reward of 0, so without a baseline it changes no logit."""
    noise = {name: round(compare(*which, p=0.9).noise, 2) for name, which in UNBIASED.items()}
    assert noise == {"trajectory": 0.93, "turn+outcome": 0.95, "no baseline": 0.20}


def test_with_only_a_final_reward_turn_plus_outcome_equals_trajectory():
    for p, n in itertools.product([0.1, 0.5], [2, 8]):
        whole, both = (compare("rloo", credit, p, n, AT_THE_END) for credit in ("trajectory", "turn+outcome"))
        assert np.array_equal(whole.expected, both.expected) and whole.deviation == both.deviation


def test_the_table_of_the_study():
    text = STUDY.read_text(encoding="utf-8")
    table = re.search(r"^\| estimator \|.*\n\|[-|]+\n((?:\|.*\n)+)", text, re.MULTILINE)
    rows = [[cell.strip() for cell in line[1:-1].split("|")] for line in table[1].splitlines()]
    assert len(rows) == 7
    for names, credit, *cells in rows:
        for method in re.findall(r"`(\w+)`", names):
            measured = []
            for p in (0.1, 0.5):
                made = compare(method, credit.strip("`"), p=p)
                measured += [", ".join(f"{x:.3f}" for x in made.ratio), f"{made.cosine:.3f}", f"{made.noise:.2f}"]
            assert cells == measured, (method, credit)


# ---- maxrl: its difference from the gradient of the logarithm


def maxrl_factor(p, n):
    """Return the expected gradient of a choice that succeeds with probability p, divided by the gradient of p."""
    kinds = [Episode(1 - p, [0.0], [False]), Episode(p, [1.0], [True])]
    groups = Groups(kinds, n)
    advantages = estimate(groups.batch, AlgorithmConfig(advantage_method="maxrl")).reshape(groups.kind.shape)
    score = np.where(groups.kind, 1 / p, -1 / (1 - p))
    return float(groups.moments((advantages * score).mean(axis=1)[:, None])[0][0])


def test_maxrl_amplifies_a_rare_success_by_at_most_n_minus_1():
    """The gradient of the log of the success rate is 1 / p times that of p."""
    for p, n in itertools.product([0.01, 0.1, 0.5, 0.9], [2, 8, 16]):
        assert maxrl_factor(p, n) == pytest.approx((1 - (1 - p) ** (n - 1)) / p, rel=1e-9), (p, n)
        assert maxrl_factor(p, n) <= min(1 / p, n - 1)
    assert [f"{maxrl_factor(p, 8):.1f}" for p in (0.01, 0.1, 0.5)] == ["6.8", "5.2", "2.0"]
    assert f"{maxrl_factor(0.01, 64):.0f}" == "47"


# ---- tokens of an older policy


def stale(shift, p=0.3, n=8, rewards=PER_TURN, loss="ppo", correction="none", anchor="rollout", **settings):
    """Return the gradient at logits that are `shift` above the sampling logits, and the share of tokens that count."""
    logit = math.log(p / (1 - p)) + shift
    kinds, groups = episodes(p, rewards), all_groups(p, n, rewards)
    config = AlgorithmConfig(
        advantage_method="rloo", credit="turn+outcome", loss_fn=loss, off_policy_correction=correction, **settings
    )
    advantages, mask = (torch.tensor(x) for x in (estimate(groups.batch, config), groups.batch.mask))
    flags = np.zeros((len(kinds), TURNS), dtype=bool)
    for row, kind in zip(flags, kinds, strict=True):
        row[: len(kind.right)] = kind.right
    right = torch.tensor(flags[groups.kind.ravel()])
    logits = torch.full((len(groups.chances), TURNS), logit, dtype=torch.float64, requires_grad=True)
    log_right, log_wrong = (torch.nn.functional.logsigmoid(sign * logits.repeat_interleave(n, 0)) for sign in (1, -1))
    now = torch.where(right, log_right, log_wrong)[mask]
    sampled = torch.where(right, *torch.tensor([p, 1 - p], dtype=torch.float64).log())[mask]
    trajectory = torch.arange(len(mask))[:, None].expand(mask.shape)[mask]
    old = sampled if anchor == "rollout" else now.detach()
    tokens = TokenBatch(now, old, advantages[mask], sampled, trajectory)
    weights = find_correction(correction)(now.detach() - sampled, tokens, config)
    (find_loss(loss)(tokens, config)[0] * weights).sum().backward()
    expected, deviation = groups.moments(-logits.grad.numpy() / n)
    chance = torch.tensor(groups.chances).repeat_interleave(n)[trajectory]
    share = float((chance * (weights != 0)).sum() / chance.sum())
    return Compared(expected, true_gradient(1 / (1 + math.exp(-logit)), rewards), deviation), share


UNCLIPPED = {"clip_low_threshold": 0.0, "clip_high_threshold": math.inf}
GSPO = {"loss": "gspo", "clip_low_threshold": 0.9997, "clip_high_threshold": 1.0004}
BOTH = list(itertools.product((0.3, 0.5), (PER_TURN, AT_THE_END)))


def bias(shift, **settings):
    return round(stale(shift, **settings)[0].bias, 2)


def test_without_a_shift_nothing_is_biased():
    for settings in ({}, GSPO, {"correction": "geometric"}, {"loss": "decoupled_ppo", "anchor": "old"}):
        assert stale(0.0, **settings)[0].bias == pytest.approx(0.0, abs=1e-9)


def test_the_rollout_anchor_corrects_only_for_the_age_of_the_token_itself():
    """The effect of the age of earlier and later tokens on states and rewards remains, and the clip adds to it."""
    assert [bias(0.3, p=p) for p in (0.3, 0.5)] == [0.82, 0.18]
    assert [bias(0.3, p=p, **UNCLIPPED) for p in (0.3, 0.5)] == [0.19, 0.18]
    assert [bias(0.3, p=p, anchor="old") for p in (0.3, 0.5)] == [0.28, 0.20]
    for p in (0.3, 0.5):
        one = bias(0.3, p=p, **UNCLIPPED)
        for correction in ("tis", "icepop"):
            assert bias(0.3, p=p, anchor="old", correction=correction) == one
        assert bias(0.3, p=p, anchor="old", loss="decoupled_ppo") == one


def test_the_ratio_of_whole_trajectories_is_exact():
    for p, rewards in BOTH:
        made, _ = stale(0.3, p=p, rewards=rewards, anchor="old", correction="sequence_tis", correction_high=math.inf)
        assert made.bias == pytest.approx(0.0, abs=1e-9)
        assert bias(0.3, p=p, rewards=rewards, anchor="old", correction="sequence_tis") == 0.0
    exact, token, none = (
        stale(0.3, **settings)[0]
        for settings in ({"anchor": "old", "correction": "sequence_tis"}, UNCLIPPED, {"anchor": "old"})
    )
    deviations = [made.deviation / float(np.linalg.norm(made.true)) for made in (exact, token, none)]
    assert [round(deviation, 1) for deviation in deviations] == [1.2, 0.8, 0.7], "of one group, by the true length"


@pytest.mark.parametrize(
    ("turns", "variance", "capped"), [(3, 0.07, (0.07, 1.0)), (10, 0.25, (0.19, 0.98)), (100, 7.96, (0.43, 0.62))]
)
def test_the_weight_of_long_trajectories_varies_more(turns, variance, capped):
    """Every turn has a choice with probability 1/2. The cap of 2 bounds the variance, and the mean weight is below
    1."""
    logprobs = torch.tensor([math.log(1 / (1 + math.exp(-x))) for x in (-0.3, 0.3)], dtype=torch.float64)
    rights = torch.arange(turns + 1)
    sampled = (torch.arange(turns) < rights[:, None]).long()
    difference = (logprobs[sampled] - math.log(0.5)).flatten()
    tokens = TokenBatch(difference, difference, difference, trajectory=rights.repeat_interleave(turns))
    chance = torch.tensor([math.comb(turns, right) / 2**turns for right in rights.tolist()], dtype=torch.float64)

    def of_weights(high):
        config = AlgorithmConfig(correction_high=high)
        weights = find_correction("sequence_tis")(difference, tokens, config).reshape(turns + 1, turns)[:, 0]
        mean = (chance * weights).sum().item()
        return mean, (chance * weights.square()).sum().item() - mean**2

    assert of_weights(math.inf) == (pytest.approx(1.0), pytest.approx(variance, abs=0.006))
    mean, spread = of_weights(None)
    assert (spread, mean) == pytest.approx(capped, abs=0.006)


def test_narrow_bounds_around_the_engines_log_probs_remove_the_gradient_of_gspo():
    """Norm of the remaining gradient, and its bias, at a shift of 0.02. With bounds around the trainer's own log-probs
    the gradient is complete."""
    left = [stale(0.02, p=p, rewards=rewards, **GSPO)[0] for p, rewards in BOTH]
    assert [round(made.size, 2) for made in left] == [0.04, 0.15, 0.13, 0.23]
    assert [round(made.cosine, 2) for made in left] == [-0.16, -0.45, 0.16, -0.16]
    assert all(0.98 < made.bias < 1.1 for made in left)
    wide = GSPO | {"clip_low_threshold": 0.98, "clip_high_threshold": 1.02}
    for p, rewards in BOTH:
        assert stale(0.02, p=p, rewards=rewards, anchor="old", **GSPO)[0].bias < 0.04
        assert stale(0.02, p=p, rewards=rewards, **wide)[0].bias < 0.04
        assert stale(0.1, p=p, rewards=rewards, **wide)[0].bias > 0.8


def test_narrow_bounds_of_geometric_mask_stale_tokens():
    """`geometric` masks all tokens at a shift of 0.02, or all except trajectories whose differences cancel; `mis` masks
    none."""
    made = [stale(0.02, p=p, rewards=rewards, correction="geometric") for p, rewards in BOTH]
    assert [round(share, 2) for _, share in made] == [0.0, 0.0, 0.29, 0.29]
    assert all(0.98 < compared.bias < 1.03 for compared, _ in made)
    assert all(stale(0.1, p=p, rewards=rewards, correction="geometric")[1] == 0.0 for p, rewards in BOTH)
    wide = {"correction": "geometric", "correction_low": 0.95, "correction_high": 1.05}
    for settings in (wide, {"correction": "mis"}, {"correction": "sequence_tis", "anchor": "old"}):
        for p, rewards in BOTH:
            compared, share = stale(0.02, p=p, rewards=rewards, **settings)
            assert share == pytest.approx(1.0) and compared.bias < 0.03, settings
