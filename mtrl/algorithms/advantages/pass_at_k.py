"""Advantages for pass@k: only the best of k trajectories counts, so the first success in a group has the largest
advantage.

The weight functions map rewards [..., n] of groups of n to weights of the same shape. With PKPO's weights, the *sum*
over the group of weight x score function has the gradient of E[max of k] as its expectation; an advantage is averaged
over the group, so it is n times the weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np

from mtrl.algorithms.batch import CreditBatch, Floats
from mtrl.algorithms.registry import advantage_estimator
from mtrl.config.algorithm_schema import AlgorithmConfig, PassKConfig
from mtrl.errors import UserError

CHEN_EPSILON = 1e-6


@advantage_estimator("grpo_passk", needs_group=True, credits=("trajectory",))
def grpo_passk(batch: CreditBatch, config: AlgorithmConfig) -> Floats:
    """Advantages by `passk.estimator` and `passk.k`: n times the weights of `pkpo_sloo1` or `pkpo_sloo`, or `chen` or
    `top2` as published.

    Equal rewards give exactly 0, except under `pkpo_sloo` (its baseline does not cancel them).

    Raises:
        UserError: the estimator is unknown, a group is too small for k, or `chen` cannot use the rewards.
    """
    groups = batch.groups
    first = groups.spread(batch.outcomes[groups.starts])
    rewards = np.where(groups.are_equal(batch.outcomes), first, batch.outcomes)  # removes rounding differences
    advantages = np.zeros_like(rewards)
    for size in np.unique(groups.sizes).tolist():
        members = groups.starts[groups.sizes == size, None] + np.arange(size)
        advantages[members] = group_advantages(rewards[members], config.passk)
    return batch.broadcast(advantages)


def group_advantages(rewards: Floats, settings: PassKConfig) -> Floats:
    """Return the advantages [P, n] of P groups of n trajectories.

    Raises:
        UserError: as for `grpo_passk`.
    """
    name, k, n = settings.estimator, settings.k, rewards.shape[-1]
    if name not in ADVANTAGES:
        raise UserError(f"algorithm.passk.estimator={name} is not known; choose one of {', '.join(ADVANTAGES)}")
    most = n - 1 if name == "pkpo_sloo" else n
    if not 1 <= k <= most and name != "top2":
        raise UserError(
            f"algorithm.passk.k={k} must be from 1 to {most} for a group of {n} trajectories under "
            f"algorithm.passk.estimator={name}; change it or algorithm.group_size"
        )
    graded = rewards[(rewards != 0.0) & (rewards != 1.0)]
    if name == "chen" and len(graded):
        raise UserError(
            f"algorithm.passk.estimator=chen needs trajectory rewards of exactly 0 or 1 and got {graded[0]:g}; set "
            "algorithm.passk.estimator=pkpo_sloo1, which takes any, or change reward.components"
        )
    return ADVANTAGES[name](rewards, k)


def pkpo_s(rewards: Floats, k: int) -> Floats:
    """Mean over all k-subsets of the subset's best reward if it contains i, else 0 (PKPO, 2505.15201): the estimator
    s_i without a baseline. Σ_i s_i = k rho, where rho(rewards, k) is the mean of the best reward over all k-subsets,
    the unbiased estimate of E[max of k] (eq. 12)."""
    n = rewards.shape[-1]
    order, ranked = ascending(rewards)
    best = shares(n, k, 0, k - 1) * ranked
    beaten = exclusive_sum_above(shares(n, k, -1, k - 2) * ranked)
    return unranked(best + beaten, order)


def pkpo_sloo(rewards: Floats, k: int) -> Floats:
    """s_i - k/(n-1) rho(rewards without i, k), for k < n (PKPO, 2505.15201, eq. 29): unbiased, since the baseline does
    not depend on i, but not 0 for equal rewards, since their weights differ for n and n-1."""
    n = rewards.shape[-1]
    order, ranked = ascending(rewards)
    below = exclusive_sum_below(shares(n - 1, k, 0, k - 1, n) * ranked)
    above = exclusive_sum_above(shares(n - 1, k, -1, k - 1, n) * ranked)
    return pkpo_s(rewards, k) - k / (n - 1) * unranked(below + above, order)


def pkpo_sloo1(rewards: Floats, k: int) -> Floats:
    """s_i - k/n rho(rewards without i, k-1): k/n times the mean gain of i over the best of k-1 others (PKPO,
    2505.15201, eq. 33). For k = 1, where no others would remain to compare with, it is RLOO's weight.

    It is computed from the gaps d_m = g_(m+1) - g_(m), as Σ_{m < i} C(m, k-1) d_m / C(n, k), so that it is never
    negative and equal rewards give exactly equal weights. It has the least variance of the three, and allows k = n.
    """
    n = rewards.shape[-1]
    order, ranked = ascending(rewards)
    gaps = np.diff(ranked, axis=-1, append=ranked[..., -1:])
    if k > 1:
        return unranked(exclusive_sum_below(shares(n, k, 1, k - 1) * gaps), order)
    lower = np.arange(1, n + 1)  # number of rewards below each gap
    gained, missed = exclusive_sum_below(lower * gaps), ((n - lower) * gaps)[..., ::-1].cumsum(axis=-1)[..., ::-1]
    return unranked((gained - missed) / (n * max(n - 1, 1)), order)


def chen(rewards: Floats, k: int) -> Floats:
    """The advantages of Pass@k Training (2508.10751), for rewards of exactly 0 and 1.

    (1 - rho) / (sigma + 1e-6) for a success, (1 - rho - C(n-c-1, k-1)/C(n-1, k-1)) / (sigma + 1e-6) for a failure,
    sigma = sqrt(rho (1 - rho)). Both are 0 if every k-subset contains a success, and if there is no success.
    """
    n = rewards.shape[-1]
    missed = shares(n, k, 0, k, n + 1)[failures(rewards)]
    return chen_differences(rewards, k) / (np.sqrt(missed * (1.0 - missed)) + CHEN_EPSILON)


def chen_differences(rewards: Floats, k: int) -> Floats:
    """`chen` without the division by sigma. Its sum over the group has (n-k)/k times the gradient of pass@k as its
    expectation, so the gradient is 0 at k = n."""
    n = rewards.shape[-1]
    missed = shares(n, k, 0, k, n + 1)[failures(rewards)]
    missed_with_it = shares(n - 1, k - 1, -1, k - 1, n + 1)[failures(rewards)]
    return np.where(rewards == 1.0, missed, missed - missed_with_it)


def failures(rewards: Floats) -> np.ndarray:
    """Return the number of rewards of 0 in each group, [..., 1]."""
    return (rewards == 0.0).sum(axis=-1, keepdims=True)


def top2(rewards: Floats) -> Floats:
    """The best trajectory gets its lead over the second best, all others get 0 (2503.19595, verl's `grpo_passk`).

    It has no k: it equals `pkpo_sloo1` at k = n, so its sum over the group is unbiased for pass@n, n the group size.
    """
    return pkpo_sloo1(rewards, rewards.shape[-1])


ADVANTAGES: dict[str, Callable[[Floats, int], Floats]] = {
    "pkpo_sloo1": lambda rewards, k: rewards.shape[-1] * pkpo_sloo1(rewards, k),
    "pkpo_sloo": lambda rewards, k: rewards.shape[-1] * pkpo_sloo(rewards, k),
    "chen": chen,
    "top2": lambda rewards, k: top2(rewards),
}


def choose(n: int, k: int) -> int:
    """C(n, k); 0 where a number is negative."""
    return math.comb(n, k) if n >= 0 and k >= 0 else 0


@lru_cache(maxsize=64)
def shares(n: int, k: int, first: int, chosen: int, length: int | None = None) -> Floats:
    """Return C(first + m, chosen) / C(n, k) for m = 0, 1, …, an array of `length` (None: n): shares of the k-subsets of
    n. They are quotients of integers, so that no binomial overflows and only the result is rounded."""
    subsets = math.comb(n, k)
    return np.array([choose(first + m, chosen) / subsets for m in range(length or n)])


def ascending(rewards: Floats) -> tuple[np.ndarray, Floats]:
    """Return the indices that sort each group in ascending order, and the sorted rewards."""
    order = np.argsort(rewards, axis=-1, kind="stable")
    return order, np.take_along_axis(rewards, order, axis=-1)


def unranked(ranked: Floats, order: np.ndarray) -> Floats:
    """Move values from the sorted order back to the original order."""
    values = np.empty_like(ranked)
    np.put_along_axis(values, order, ranked, axis=-1)
    return values


def exclusive_sum_below(values: Floats) -> Floats:
    """Return the sum of the values before index i, for each i, [..., n]."""
    sums = np.zeros_like(values)
    np.cumsum(values[..., :-1], axis=-1, out=sums[..., 1:])
    return sums


def exclusive_sum_above(values: Floats) -> Floats:
    """Return the sum of the values after index i, for each i, [..., n]."""
    return exclusive_sum_below(values[..., ::-1])[..., ::-1]
