"""Group baselines: comparison of a value with the values of its peers.

`algorithm.credit` selects the values that are compared, and the turns that get credit for them.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mtrl.algorithms.batch import CreditBatch, Floats, Peers, discounted_sums, fill
from mtrl.algorithms.registry import advantage_estimator
from mtrl.config.algorithm_schema import AlgorithmConfig

ALL_CREDITS = ("trajectory", "turn", "turn+outcome")

STD_EPSILON = 1e-6
"""Constant added to the standard deviation, as in GRPO's reference implementations."""

MT_GRPO_EPSILON = 1e-4
"""Constant added to the standard deviation, as in the published code."""

Compare = Callable[[Floats, Peers], Floats]
"""Function from [N] values and their sets to [N] advantages."""


@advantage_estimator("grpo", aliases=("group_based",), needs_group=True, credits=ALL_CREDITS)
def grpo(batch: CreditBatch, config: AlgorithmConfig) -> Floats:
    """(R - mean) / (std + 1e-6) of the group; std is unbiased (DeepSeekMath, 2402.03300).

    With `norm_by_std: false` only the mean is subtracted, as in `dr_grpo`. Equal rewards and a group of one give
    exactly 0.
    """
    return credited(batch, config, z_score(config, STD_EPSILON))


@advantage_estimator("dr_grpo", needs_group=True, credits=ALL_CREDITS)
def dr_grpo(batch: CreditBatch, config: AlgorithmConfig) -> Floats:
    """R - mean of the group (Dr. GRPO, 2503.20783), meant for `loss_reduction: seq_mean_token_sum_norm`.

    The mean includes the trajectory's own reward, so the expected gradient is (n-1)/n times the true one.
    """
    return credited(batch, config, lambda values, peers: peers.centre(values))


@advantage_estimator("rloo", needs_group=True, credits=ALL_CREDITS)
def rloo(batch: CreditBatch, config: AlgorithmConfig) -> Floats:
    """R_i - mean of the peers' R (RLOO, 2402.14740); a group of one gets 0.

    Unbiased for every turn with credit `trajectory`, and with `turn+outcome` if `gamma` and `turn_advantage_coef` are
    1; with credit `turn` only where every trajectory reaches the turn (`group_based_per_turn`).
    """
    return credited(batch, config, lambda values, peers: peers.leave_one_out(values))


@advantage_estimator("maxrl", needs_group=True, credits=ALL_CREDITS)
def maxrl(batch: CreditBatch, config: AlgorithmConfig) -> Floats:
    """(R - mean) / mean of the group, 0 where the mean is not above 0 (MaxRL, 2602.02710); for rewards of at least 0.

    A rarer success gets a larger advantage: the objective is the log of the success rate p, where that of `dr_grpo` is
    p. The expected gradient is that of p times (1 - (1 - p)^(n-1)) / p: the log's 1 / p where n p is large, and never
    more than n - 1.
    """

    def relative(values: Floats, peers: Peers) -> Floats:
        mean = peers.mean(values)
        return np.divide(peers.centre(values), mean, out=np.zeros_like(values), where=mean > peers.rounding(values))

    return credited(batch, config, relative)


@advantage_estimator("opo", needs_group=True, credits=("trajectory",))
def opo(batch: CreditBatch, config: AlgorithmConfig) -> Floats:
    """R - Σ L_j R_j / Σ L_j over the group, L the sampled tokens of a trajectory (OPO, 2505.23585).

    This baseline has the least variance if the squared gradient of a trajectory is proportional to its length. The
    lengths are those of whole trajectories, so there is no credit per turn.
    """
    rewards, lengths, groups = batch.outcomes, batch.lengths.astype(np.float64), batch.groups
    total = groups.sum(lengths)
    baseline = groups.sum(lengths * rewards) / np.maximum(total, 1.0)
    return batch.broadcast(np.where(groups.are_equal(rewards) | (total == 0), 0.0, rewards - baseline))


@advantage_estimator("group_based_per_turn", needs_group=True, credits=("turn",))
def group_based_per_turn(batch: CreditBatch, config: AlgorithmConfig) -> Floats:
    """Return-to-go of each turn, minus its mean over the peers that reached that turn.

    A_{i,t} = G_{i,t} - mean_{j != i, T_j > t} G_{j,t} with G_{i,t} = sum_{s >= t} gamma^(s-t) r_{i,s}. The baseline
    does not depend on trajectory i, so the gradient estimate is unbiased given that a peer reached the turn. It is not
    divided by a standard deviation, which would scale each turn index differently.

    A turn that no peer reached has no baseline: it gets 0, and `signal.lonely_turns` counts it. The expected gradient
    of turn t is therefore the true one times 1 - (1 - P)^(n-1), P the probability that a trajectory reaches turn t: the
    estimate is biased if trajectories differ in length. `rloo` with `credit: turn+outcome` has no such bias.
    """
    return per_turn(batch, config, lambda values, peers: peers.leave_one_out(values))


@advantage_estimator("turn_rloo", needs_group=True, credits=("turn+outcome",))
def turn_rloo(batch: CreditBatch, config: AlgorithmConfig) -> Floats:
    """RLOO of the outcome, plus `turn_advantage_coef` times RLOO of the turn rewards from each turn on: the same as
    `rloo` with credit `turn+outcome`.

    With `gamma` and `turn_advantage_coef` of 1 it is unbiased for every turn, in any group of two or more: both parts
    are compared with those of all peers, of any length, and there is no division by a standard deviation. If
    only the last turn has a reward, it equals RLOO (2402.14740).
    """
    return per_turn_and_outcome(batch, config, lambda values, peers: peers.leave_one_out(values))


@advantage_estimator("mt_grpo", needs_group=True, credits=("turn+outcome",))
def mt_grpo(batch: CreditBatch, config: AlgorithmConfig) -> Floats:
    """A^outcome + `turn_advantage_coef` A^turn before the last turn, A^outcome on it; both are z-scores over the group
    with 1e-4 added to the standard deviation (MT-GRPO, 2505.11821). More than two turns: see `per_turn_and_outcome`.
    """
    return per_turn_and_outcome(batch, config, z_score(config, MT_GRPO_EPSILON))


def z_score(config: AlgorithmConfig, epsilon: float) -> Compare:
    """Return the comparison (value - mean) / (std + epsilon), std unbiased; with `norm_by_std: false`, value - mean."""

    def compare(values: Floats, peers: Peers) -> Floats:
        return peers.standardise(values, epsilon) if config.norm_by_std else peers.centre(values)

    return compare


def credited(batch: CreditBatch, config: AlgorithmConfig, compare: Compare, default: str = "trajectory") -> Floats:
    """Return the advantages [M, T] with the credit of `config.credit`, or with the method's default if it is null."""
    how = {"trajectory": per_trajectory, "turn": per_turn, "turn+outcome": per_turn_and_outcome}
    return how[config.credit or default](batch, config, compare)


def per_trajectory(batch: CreditBatch, config: AlgorithmConfig, compare: Compare) -> Floats:
    """Compare the sum of all rewards with those of the group; every turn gets the result."""
    return batch.broadcast(compare(batch.outcomes, batch.groups))


def per_turn(batch: CreditBatch, config: AlgorithmConfig, compare: Compare) -> Floats:
    """Compare the return-to-go of each turn, G_t = r_t + gamma G_{t+1}, with those of the peers that reached the turn.

    A turn without such a peer gets 0, so the expected gradient of a turn is scaled by the probability that it has one.

    Two simpler variants are biased: comparing the immediate rewards turn by turn before they are summed, and using the
    immediate reward alone. Both have an expected gradient of 0 for the decision to continue (verl#7244).
    """
    reached = batch.mask.T  # transposed, so that the peers are adjacent
    returns = discounted_sums(batch.rewards, config.gamma).T[reached]
    magnitudes = discounted_sums(abs(batch.rewards), config.gamma).T[reached]
    return fill(reached, compare(returns, Peers(turn_and_group(batch)[reached], magnitudes))).T


def per_turn_and_outcome(batch: CreditBatch, config: AlgorithmConfig, compare: Compare) -> Floats:
    """A_t = A^outcome + c Σ_{s >= t} gamma^(s-t) A^turn_s, c = `turn_advantage_coef` (MT-GRPO, 2505.11821, eq. 12).

    The outcome is the reward of a trajectory's last turn, and the rewards of the turns before it are turn rewards.
    With two turns this equals the published code: the first gets A^outcome + c A^turn, the second A^outcome. From its
    last turn on, a trajectory takes part in the comparison with turn rewards of 0, since a comparison of only the
    trajectories that continued would ignore the decision to continue. So every turn has peers, and with leave-one-out,
    gamma = 1 and c = 1 the advantage is G_t minus a term that does not depend on the trajectory, which is unbiased for
    every turn.
    """
    last = batch.mask & ~np.pad(batch.mask, ((0, 0), (0, 1)))[:, 1:]
    outcomes = np.where(last, batch.rewards, 0.0).sum(axis=1)
    before = np.where(last, 0.0, batch.rewards).T  # transposed, so that the peers are adjacent
    compared = compare(before.ravel(), Peers(turn_and_group(batch).ravel())).reshape(before.shape)
    to_go = discounted_sums(np.ascontiguousarray(compared.T), config.gamma)
    whole = compare(outcomes, Peers(batch.group))[:, None] + config.turn_advantage_coef * to_go
    return np.where(batch.mask, whole, 0.0)


def turn_and_group(batch: CreditBatch) -> np.ndarray:
    """Return [T, M] ids that are equal for turns of the same group with the same turn index."""
    turns, trajectories = batch.mask.shape[1], len(batch.group)
    return np.arange(turns)[:, None] * (trajectories + 1) + batch.group
