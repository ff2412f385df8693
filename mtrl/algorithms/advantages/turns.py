"""Estimators of one advantage per turn."""

from __future__ import annotations

from mtrl.algorithms.advantages.credit import per_turn, per_turn_and_outcome, z_score
from mtrl.algorithms.batch import CreditBatch
from mtrl.algorithms.peers import Floats
from mtrl.algorithms.registry import advantage_estimator
from mtrl.config.schema import AlgorithmConfig

MT_GRPO_EPSILON = 1e-4
"""Constant added to the standard deviation, as in the published code."""


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
