"""Sampling that does not depend on the batch: token = f(seed, position, distribution)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX2 = np.uint64(0x94D049BB133111EB)


def counter_uniform(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Uniform numbers in [0, 1) from uint64 counters (SplitMix64, Steele et al. 2014); shapes broadcast."""
    with np.errstate(over="ignore"):
        x = _mix(seeds.astype(np.uint64) + _GOLDEN)
        x = _mix(x + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    return (x >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * _MIX1
    x = (x ^ (x >> np.uint64(27))) * _MIX2
    return x ^ (x >> np.uint64(31))


def sample(
    logits: Tensor, temperatures: Tensor, uniforms: Tensor, top_p: Tensor | None = None, top_k: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Draw one token per row by inverse CDF.

    Args:
        logits: [n, V].
        temperatures: [n]; 0 is greedy.
        uniforms: [n] float64 in [0, 1).
        top_p, top_k: [n], or None where no row cuts its distribution. They choose what may be drawn; the log-probs
            stay those of the whole distribution, which is what the trainer computes.

    Returns:
        ids [n] int64 and log-probs [n] float32: log-softmax of logits / temperature (temperature 1 when greedy).
    """
    greedy = temperatures == 0
    scaled = logits.float() / torch.where(greedy, torch.ones_like(temperatures), temperatures)[:, None]
    logprobs = torch.log_softmax(scaled, dim=-1)
    if bool(greedy.all()):
        ids = logprobs.argmax(-1)
    else:
        allowed = _truncate(logprobs.exp(), top_p, top_k).double()
        cdf = allowed.cumsum(-1)
        # A row's target stays below its total, so a token of probability 0 at the end is never drawn.
        target = uniforms[:, None] * cdf[:, -1:]
        ids = torch.searchsorted(cdf, target, right=True).squeeze(-1).clamp_(max=logits.shape[-1] - 1)
        if bool(greedy.any()):
            ids = torch.where(greedy, logprobs.argmax(-1), ids)
    return ids, logprobs.gather(-1, ids[:, None]).squeeze(-1)


def _truncate(probs: Tensor, top_p: Tensor | None, top_k: Tensor | None) -> Tensor:
    if top_p is None and top_k is None:
        return probs
    ranked, order = probs.sort(-1, descending=True)
    keep = torch.ones_like(ranked, dtype=torch.bool)
    if top_k is not None:
        limit = torch.where(top_k > 0, top_k, torch.full_like(top_k, probs.shape[-1]))
        keep &= torch.arange(probs.shape[-1], device=probs.device) < limit[:, None]
    if top_p is not None:
        # A row that does not cut keeps even what rounding pushes past 1: its draws must not depend on the others.
        keep &= (ranked.cumsum(-1) - ranked < top_p[:, None]) | (top_p >= 1)[:, None]
    keep[:, 0] = True
    return torch.zeros_like(probs).scatter(-1, order, ranked * keep)
