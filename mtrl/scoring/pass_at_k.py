"""pass@k: the probability that at least one of k samples succeeds, estimated without bias from n >= k samples."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mtrl.errors import UserError


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return 1 - C(n-c, k) / C(n, k): the share of the k-subsets of n samples with at least one of the c successes.

    This is the unbiased estimator of Chen et al., 2107.03374, eq. 1. It is computed with integers, so only the result
    is rounded. (The plug-in estimator 1 - (1 - c/n)^k is biased low.)

    Raises:
        UserError: 1 <= k <= n does not hold.
        ValueError: 0 <= c <= n does not hold.
    """
    _check(n, k)
    if not 0 <= c <= n:
        raise ValueError(f"{c} successes among {n} samples")
    subsets = math.comb(n, k)
    return (subsets - math.comb(n - c, k)) / subsets


def pass_at_k_by_prompt(scores: Sequence[Sequence[float]], k: int, success_threshold: float = 1.0) -> list[float]:
    """Return the pass@k of each prompt; a sample succeeds if its score reaches `success_threshold`.

    The mean of the values is the pass@k to report; `statistics.mean_rate` adds its confidence interval.

    Args:
        scores: P prompts, each with the scores of its n samples; n may differ between prompts.

    Raises:
        UserError: A prompt has fewer than k samples.
    """
    counts = [(len(samples), sum(score >= success_threshold for score in samples)) for samples in scores]
    return [pass_at_k(n, c, k) for n, c in counts]


def _check(n: int, k: int) -> None:
    if not 1 <= k <= n:
        raise UserError(f"evaluation.pass_k_values: pass@{k} needs 1 <= k <= samples per row, which is {n}")
