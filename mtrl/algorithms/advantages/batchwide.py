"""Estimators that use all trajectories of the batch, and `monte_carlo`, which uses no baseline."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mtrl.algorithms.advantages.baselines import ALL_CREDITS, STD_EPSILON, credited
from mtrl.algorithms.batch import CreditBatch, Floats, Peers, fill, whiten
from mtrl.algorithms.registry import advantage_estimator
from mtrl.config.algorithm_schema import AlgorithmConfig
from mtrl.types import ENVIRONMENT


@advantage_estimator("monte_carlo", credits=("turn", "trajectory"))
def monte_carlo(batch: CreditBatch, config: AlgorithmConfig) -> Floats:
    """The return itself, without a baseline (REINFORCE): with credit `turn` G_t = r_t + gamma G_{t+1}, with credit
    `trajectory` the sum of all rewards. Equal rewards other than 0 therefore have a gradient."""
    return credited(batch, config, lambda values, peers: values, default="turn")


@advantage_estimator("reinforce_pp", aliases=("reinforce_plus_plus",), credits=("turn", "trajectory"))
def reinforce_pp(batch: CreditBatch, config: AlgorithmConfig) -> Floats:
    """The returns of `monte_carlo`, whitened over all sampled tokens of the batch (REINFORCE++, 2501.03262).

    It needs no group. All advantages are 0 only in a batch of equal returns.
    """
    return whiten(monte_carlo(batch, config), batch.tokens, batch.magnitudes.max(initial=0.0))


@advantage_estimator(
    "reinforce_pp_baseline",
    aliases=("reinforce_plus_plus_baseline",),
    needs_group=True,
    credits=("trajectory", "turn"),
)
def reinforce_pp_baseline(batch: CreditBatch, config: AlgorithmConfig) -> Floats:
    """R - mean of the group, whitened over all sampled tokens of the batch (REINFORCE++-baseline, 2501.03262).

    Whitening also subtracts the batch's mean over tokens, which is not 0 if centred rewards depend on the length. A
    group of equal rewards then gets that constant as its advantage (0 in a batch where all groups have equal rewards).
    """
    centred = credited(batch, config, lambda values, peers: peers.centre(values))
    return whiten(centred, batch.tokens, batch.magnitudes.max(initial=0.0))


@advantage_estimator("gpg", needs_group=True, credits=ALL_CREDITS)
def gpg(batch: CreditBatch, config: AlgorithmConfig) -> Floats:
    """alpha (R - mean of the group), alpha = trajectories / trajectories with a reward other than 0 (GPG, 2504.02546).

    F_norm is 1. Alpha compensates for trajectories without a gradient; it is counted over the batch, as in verl, and
    assumes a reward of 0 for a failure. (The authors' code counts the groups whose rewards differ.)
    """
    earned = abs(batch.outcomes) > batch.groups.rounding(batch.outcomes)
    alpha = len(earned) / max(int(earned.sum()), 1)
    return credited(batch, config, lambda values, peers: alpha * peers.centre(values))


@advantage_estimator("gdpo", needs_group=True, credits=("trajectory",))
def gdpo(batch: CreditBatch, config: AlgorithmConfig) -> Floats:
    """Σ_c w_c z_c, whitened over all sampled tokens of the batch (GDPO, 2601.05242).

    z_c is the z-score within the group of component c of `reward.components`, summed over the trajectory, and w_c its
    weight. So the influence of a component depends on its weight and not on its spread, and differences that cancel in
    the sum of the rewards still count. Without weights the reward is the only component.
    """
    weights = batch.component_weights or {ENVIRONMENT: 1.0}
    total, group = np.zeros(len(batch.group)), Peers(batch.group)
    for weight, values in zip(weights.values(), components(batch, list(weights)), strict=True):
        total += weight * group.standardise(values.sum(axis=1), STD_EPSILON)
    return whiten(batch.broadcast(total), batch.tokens, sum(map(abs, weights.values())))


def components(batch: CreditBatch, names: Sequence[str]) -> list[Floats]:
    """Return [M, T] for each of these components of the rewards; 0 where a component was not reported. Turns whose
    rewards no composition changed have no components; `environment` is their reward then."""
    flat = [
        turn.components.get(name, turn.reward if name == ENVIRONMENT else 0.0) for turn in batch.turns for name in names
    ]
    return [fill(batch.mask, flat[column :: len(names)]) for column in range(len(names))]
