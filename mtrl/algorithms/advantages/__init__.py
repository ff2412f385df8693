"""Advantages: from the rewards of a step's groups to one number per turn.

An estimator maps a `CreditBatch` to an array of its shape [M, T]. All tokens of a turn share its advantage; only `gae`
works per token. Advantages are constants: no gradient flows through them.

R is the sum of a trajectory's rewards, G_t = r_t + gamma G_{t+1} the return-to-go of a turn, n the size of the group.
The first of the credits is the default of `algorithm.credit`; `all` is trajectory, turn, turn+outcome; `fixed` means
that the credit cannot be chosen.

========================  =====================================  ==========  =================  =======================
method                    advantage                              arXiv       credits            compared with
========================  =====================================  ==========  =================  =======================
grpo, group_based         (R - mean) / (std + 1e-6)              2402.03300  all                its group
dr_grpo                   R - mean                               2503.20783  all                its group
rloo                      R_i - mean of the others               2402.14740  all                its group
maxrl                     (R - mean) / mean                      2602.02710  all                its group
opo                       R - Σ L_j R_j / Σ L_j, L tokens        2505.23585  trajectory         its group
grpo_passk                k x gain of R_i over the best of k-1   2505.15201  trajectory         its group
group_based_per_turn      G_t - mean of the others' G_t          verl#7244   turn               peers that reached t
turn_rloo                 as rloo, of outcome and turn rewards   2402.14740  turn+outcome       its group
mt_grpo                   z(outcome) + c Σ z(turn reward)        2505.11821  turn+outcome       its group
gigpo                     z(R) + c z(G_t)                        2505.10978  fixed              group; same observation
gpg                       alpha (R - mean), alpha of the batch   2504.02546  all                its group
gdpo                      Σ_c w_c z(R of component c), whitened  2601.05242  trajectory         its group, the batch
reinforce_pp_baseline     R - mean, whitened                     2501.03262  trajectory, turn   its group, the batch
reinforce_pp              G_t, whitened                          2501.03262  turn, trajectory   the batch
monte_carlo               G_t                                    -           turn, trajectory   nothing
gae, turn_gae             Σ_l (gamma lambda)^l delta_{t+l}       1506.02438  fixed              a critic
========================  =====================================  ==========  =================  =======================
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from mtrl.algorithms.advantages import baselines, batchwide, gae, gigpo, pass_at_k
from mtrl.algorithms.batch import CreditBatch, Floats, Ragged
from mtrl.algorithms.registry import find_estimator
from mtrl.config.algorithm_schema import AlgorithmConfig
from mtrl.errors import UserError
from mtrl.types import Group

__all__ = ["baselines", "batchwide", "estimate", "gae", "gigpo", "pass_at_k", "turn_advantages"]


def estimate(batch: CreditBatch, config: AlgorithmConfig) -> Floats:
    """Return the advantages [M, T] of the estimator that `config.advantage_method` names; 0 in the padding.

    Raises:
        UserError: the estimator is unknown, does not support the credit, or cannot use these rewards.
        ValueError: the estimator (a user's) returned another shape or a number that is not finite.
    """
    method = find_estimator(config.advantage_method)
    if config.credit is not None and config.credit not in method.credits:
        raise UserError(
            f"algorithm.credit={config.credit} is not one of algorithm.advantage_method={config.advantage_method}; "
            f"choose {' or '.join([*method.credits, 'null'])}"
        )
    advantages = np.asarray(method(batch, config), dtype=np.float64)
    if advantages.shape != batch.mask.shape:
        raise ValueError(
            f"algorithm.advantage_method={config.advantage_method} returned the shape {advantages.shape}, "
            f"not that of the rewards, {batch.mask.shape}"
        )
    if not np.isfinite(advantages[batch.mask]).all():
        raise ValueError(f"algorithm.advantage_method={config.advantage_method} returned a number that is not finite")
    return advantages


def turn_advantages(
    groups: Sequence[Group], config: AlgorithmConfig, component_weights: Mapping[str, float] | None = None
) -> list[Ragged]:
    """Return the advantage of each turn: a list per group, of a list per trajectory, of a float per turn.

    All trajectories of a group are compared, including those that will not be trained on. Only for estimators without
    a critic.

    Args:
        component_weights: weights of `reward.components`, by name; only `gdpo` reads them.

    Raises:
        UserError, ValueError: as for `estimate`.
    """
    batch = CreditBatch.of(groups, component_weights)
    return batch.ragged(estimate(batch, config))
