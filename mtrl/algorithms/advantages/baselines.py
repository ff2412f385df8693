"""Group baselines: comparison of a value with the values of its peers. `algorithm.credit` selects the values."""

from __future__ import annotations

import numpy as np

from mtrl.algorithms.advantages.credit import credited, z_score
from mtrl.algorithms.batch import CreditBatch
from mtrl.algorithms.peers import Floats, Peers
from mtrl.algorithms.registry import advantage_estimator
from mtrl.config.schema import AlgorithmConfig

ALL_CREDITS = ("trajectory", "turn", "turn+outcome")

STD_EPSILON = 1e-6
"""Constant added to the standard deviation, as in GRPO's reference implementations."""


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
