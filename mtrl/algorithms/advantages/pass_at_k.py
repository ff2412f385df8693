"""Advantages for pass@k: the best of k trajectories counts, so a rare success is worth more than a second one.

The weight functions map rewards [..., n] of groups of n to weights of the same shape. Those of PKPO are such that the
*sum* over the group of weight x score function has the gradient of E[max of k] as its expectation; an advantage is
averaged over the group, so it is n times the weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np

from mtrl.algorithms.batch import CreditBatch
from mtrl.algorithms.peers import Floats
from mtrl.algorithms.registry import advantage_estimator
from mtrl.config.schema import AlgorithmConfig, PassKConfig
from mtrl.errors import UserError

CHEN_EPSILON = 1e-6


@advantage_estimator("grpo_passk", needs_group=True, credits=("trajectory",))
def grpo_passk(batch: CreditBatch, config: AlgorithmConfig) -> Floats:
    """The weight of `passk.estimator` for `passk.k`: n times `pkpo_sloo1` or `pkpo_sloo`, or `chen` or `top2` as they
    were published.

    Equal rewards give exactly 0, except under `pkpo_sloo` (its baseline does not cancel them).

    Raises:
        UserError: no such estimator, a group that is too small for k, or rewards that `chen` cannot use.
    """
    groups = batch.groups
    first = groups.spread(batch.outcomes[groups.starts])
    rewards = np.where(groups.are_equal(batch.outcomes), first, batch.outcomes)  # no differences that are rounding
    advantages = np.zeros_like(rewards)
    for size in np.unique(groups.sizes).tolist():
        members = groups.starts[groups.sizes == size, None] + np.arange(size)
        advantages[members] = group_advantages(rewards[members], config.passk)
    return batch.broadcast(advantages)


def group_advantages(rewards: Floats, settings: PassKConfig) -> Floats:
    """[P, n] advantages of P groups of n trajectories.

    Raises:
        UserError: as `grpo_passk`.
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


def rho(rewards: Floats, k: int) -> Floats:
    """[...] Σ_i C(i-1, k-1) g_(i) / C(n, k), rewards ascending: the unbiased estimate of E[max of k] (PKPO,
    2505.15201, eq. 12); on rewards of 0 and 1 it is pass@k, 1 - C(n-c, k) / C(n, k)."""
    n = rewards.shape[-1]
    return np.sort(rewards, axis=-1) @ shares(n, k, 0, k - 1)


def pkpo_s(rewards: Floats, k: int) -> Floats:
    """The mean over all k-subsets of their best reward where they hold i, and of 0 where not (PKPO, 2505.15201): the
    estimator without a baseline. Σ_i s_i = k rho."""
    n = rewards.shape[-1]
    order, ranked = ascending(rewards)
    best = shares(n, k, 0, k - 1) * ranked
    beaten = exclusive_sum_above(shares(n, k, -1, k - 2) * ranked)
    return unranked(best + beaten, order)


def pkpo_sloo(rewards: Floats, k: int) -> Floats:
    """s_i - k/(n-1) rho(rewards without i, k), for k < n (PKPO, 2505.15201, eq. 29): unbiased, since the baseline holds
    nothing of i, but not 0 for equal rewards, since n and n-1 weigh them differently."""
    n = rewards.shape[-1]
    order, ranked = ascending(rewards)
    below = exclusive_sum_below(shares(n - 1, k, 0, k - 1, n) * ranked)
    above = exclusive_sum_above(shares(n - 1, k, -1, k - 1, n) * ranked)
    return pkpo_s(rewards, k) - k / (n - 1) * unranked(below + above, order)


def pkpo_sloo1(rewards: Floats, k: int) -> Floats:
    """s_i - k/n rho(rewards without i, k-1): k/n times what i adds to the best of k-1 others, on average (PKPO,
    2505.15201, eq. 33). For k = 1, where no other would be left to compare with, it is RLOO's.

    Computed from the gaps d_m = g_(m+1) - g_(m), as Σ_{m < i} C(m, k-1) d_m / C(n, k): never negative, and equal
    rewards give equal weights exactly. It has the least variance of the three, and takes k = n.
    """
    n = rewards.shape[-1]
    order, ranked = ascending(rewards)
    gaps = np.diff(ranked, axis=-1, append=ranked[..., -1:])
    if k > 1:
        return unranked(exclusive_sum_below(shares(n, k, 1, k - 1) * gaps), order)
    lower = np.arange(1, n + 1)  # how many rewards lie below a gap
    gained, missed = exclusive_sum_below(lower * gaps), ((n - lower) * gaps)[..., ::-1].cumsum(axis=-1)[..., ::-1]
    return unranked((gained - missed) / (n * max(n - 1, 1)), order)


def chen(rewards: Floats, k: int) -> Floats:
    """The advantages of Pass@k Training (2508.10751), for rewards of exactly 0 and 1.

    (1 - rho) / (sigma + 1e-6) for a success, (1 - rho - C(n-c-1, k-1)/C(n-1, k-1)) / (sigma + 1e-6) for a failure,
    sigma = sqrt(rho (1 - rho)). Both are 0 where every k-subset holds a success, and where there is none.
    """
    n = rewards.shape[-1]
    missed = shares(n, k, 0, k, n + 1)[failures(rewards)]
    return chen_differences(rewards, k) / (np.sqrt(missed * (1.0 - missed)) + CHEN_EPSILON)


def chen_differences(rewards: Floats, k: int) -> Floats:
    """`chen` before its division by sigma. Its sum over the group has (n-k)/k times the gradient of pass@k as its
    expectation, so it learns nothing at k = n."""
    n = rewards.shape[-1]
    missed = shares(n, k, 0, k, n + 1)[failures(rewards)]
    missed_with_it = shares(n - 1, k - 1, -1, k - 1, n + 1)[failures(rewards)]
    return np.where(rewards == 1.0, missed, missed - missed_with_it)


def failures(rewards: Floats) -> np.ndarray:
    """[..., 1] how many rewards of each group are 0."""
    return (rewards == 0.0).sum(axis=-1, keepdims=True)


def top2(rewards: Floats) -> Floats:
    """The best gets its lead over the second best, all others 0 (2503.19595, verl's `grpo_passk`).

    It has no k: its sum over the group is unbiased for pass@n, n the size of the group, being `pkpo_sloo1` at k = n.
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
    """[length, by default n] C(first + m, chosen) / C(n, k) for m = 0, 1, …: the share of the k-subsets of n. Quotients
    of whole numbers, so that no binomial overflows and only the result is rounded."""
    subsets = math.comb(n, k)
    return np.array([choose(first + m, chosen) / subsets for m in range(length or n)])


def ascending(rewards: Floats) -> tuple[np.ndarray, Floats]:
    """The order that sorts each group, and the sorted rewards."""
    order = np.argsort(rewards, axis=-1, kind="stable")
    return order, np.take_along_axis(rewards, order, axis=-1)


def unranked(ranked: Floats, order: np.ndarray) -> Floats:
    """From values in the sorted order to the places that they came from."""
    values = np.empty_like(ranked)
    np.put_along_axis(values, order, ranked, axis=-1)
    return values


def exclusive_sum_below(values: Floats) -> Floats:
    """[..., i] the sum of the values before i."""
    sums = np.zeros_like(values)
    np.cumsum(values[..., :-1], axis=-1, out=sums[..., 1:])
    return sums


def exclusive_sum_above(values: Floats) -> Floats:
    """[..., i] the sum of the values after i."""
    return exclusive_sum_below(values[..., ::-1])[..., ::-1]
