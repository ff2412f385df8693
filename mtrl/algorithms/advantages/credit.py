"""`algorithm.credit`: the values that are compared with peers, and the turns that get credit for them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mtrl.algorithms.batch import CreditBatch, discounted_sums, fill
from mtrl.algorithms.peers import Floats, Peers
from mtrl.config.schema import AlgorithmConfig

Compare = Callable[[Floats, Peers], Floats]
"""Function from [N] values and their sets to [N] advantages."""


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
