"""Sampling that is independent of the batch: token = f(seed, position, distribution)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mtrl.engines.base import SamplingParams

LARGE = 8192
"""Minimum size of a vocabulary from which tokens are drawn in blocks."""
BLOCK = 128
"""Number of tokens in a block; it divides the vocabularies of most models."""
AHEAD = 16
"""Number of positions whose uniform numbers are generated at once."""
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX2 = np.uint64(0x94D049BB133111EB)


def counter_uniform(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return uniform float64 numbers in [0, 1) for uint64 counters (SplitMix64, Steele et al. 2014). `seeds` and
    `positions` broadcast."""
    with np.errstate(over="ignore"):
        x = _mix(seeds.astype(np.uint64) + _GOLDEN)
        x = _mix(x + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    return (x >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * _MIX1
    x = (x ^ (x >> np.uint64(27))) * _MIX2
    return x ^ (x >> np.uint64(31))


class Uniforms:
    """Uniform numbers in [0, 1) for n rows, one position after another."""

    def __init__(self, seeds: np.ndarray, positions: np.ndarray, device: torch.device):
        """
        Args:
            seeds: [n] uint64.
            positions: [n] position of the first token to sample, per row.
        """
        self._seeds, self._positions, self._device = seeds, positions, device
        self._block = torch.empty(0)
        self._used = 0

    def next(self) -> Tensor:
        """Return the numbers [n] (float64) for the next position of every row."""
        index = self._used % AHEAD
        if index == 0:
            positions = self._positions + np.arange(self._used, self._used + AHEAD)[:, None]
            self._block = torch.from_numpy(counter_uniform(self._seeds, positions)).to(self._device)
        self._used += 1
        return self._block[index]


@dataclass(frozen=True)
class SamplingRows:
    """The sampling parameters of rows that decode together. They are converted to tensors once, because with a small
    model every operation counts."""

    temperatures: Tensor | None
    """Temperature per row [n, 1] float32, 1 where a row is greedy; None if all are 1."""
    greedy: Tensor | None
    """Whether each row is greedy [n]; None if no row is."""
    all_greedy: bool
    top_p: Tensor | None
    """Top-p per row [n]; None if no row has a top-p below 1."""
    top_k: Tensor | None
    """Top-k per row [n]; None if no row has a top-k above 0."""

    @classmethod
    def of(cls, params: Sequence[SamplingParams], device: torch.device | None = None) -> SamplingRows:
        greedy = [p.temperature == 0 for p in params]
        temperatures = [p.temperature or 1.0 for p in params]
        return cls(
            torch.tensor(temperatures, device=device)[:, None] if set(temperatures) != {1.0} else None,
            torch.tensor(greedy, device=device) if any(greedy) else None,
            all(greedy),
            torch.tensor([p.top_p for p in params], device=device) if any(p.top_p < 1 for p in params) else None,
            torch.tensor([p.top_k for p in params], device=device) if any(p.top_k > 0 for p in params) else None,
        )


def sample(logits: Tensor, rows: SamplingRows, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Draw one token per row by inverse CDF.

    top-p and top-k limit the tokens that may be drawn. The log-probs are those of the whole distribution, as the
    trainer computes them.

    Args:
        logits: [n, V].
        uniforms: [n] float64 in [0, 1).

    Returns:
        ids [n] int64 and log-probs [n] float32: log-softmax of logits / temperature (temperature 1 when greedy).
    """
    scaled = logits.float() if rows.temperatures is None else logits.float() / rows.temperatures
    logprobs = torch.log_softmax(scaled, dim=-1)
    if rows.all_greedy:
        ids = logprobs.argmax(-1)
    else:
        allowed = truncated(logprobs.exp(), rows.top_p, rows.top_k)
        ids = drawn(allowed, uniforms)
        if rows.greedy is not None:
            ids = torch.where(rows.greedy, logprobs.argmax(-1), ids)
    return ids, logprobs.gather(-1, ids[:, None]).squeeze(-1)


def drawn(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Draw the index [n] of one of the weights [n, V] of each row, in proportion to them.

    Args:
        uniforms: [n] float64 in [0, 1).
    """
    return (drawn_at_once if weights.shape[-1] < LARGE else drawn_in_blocks)(weights, uniforms)


def drawn_at_once(weights: Tensor, uniforms: Tensor) -> Tensor:
    """`drawn` with float64 numbers for all weights."""
    cdf = weights.double().cumsum(-1)
    # The target of a row is below its total, so that a token of probability 0 at the end is never drawn.
    target = uniforms[:, None] * cdf[:, -1:]
    return torch.searchsorted(cdf, target, right=True).squeeze(-1).clamp_(max=weights.shape[-1] - 1)


def drawn_in_blocks(weights: Tensor, uniforms: Tensor) -> Tensor:
    """`drawn` for a large vocabulary: the float64 numbers are the sums of the blocks and the weights of one block, not
    all weights. The draws differ only where a target is within rounding of the limit between two tokens."""
    n, vocabulary = weights.shape
    blocks = F.pad(weights, (0, -vocabulary % BLOCK)).view(n, -1, BLOCK)
    sums = blocks.sum(-1, dtype=torch.float64).cumsum(-1)
    target = uniforms[:, None] * sums[:, -1:]
    block = torch.searchsorted(sums, target, right=True).clamp_(max=blocks.shape[1] - 1)
    before = torch.where(block > 0, sums.gather(-1, (block - 1).clamp_(min=0)), 0.0)
    cdf = blocks.gather(1, block[:, :, None].expand(-1, -1, BLOCK)).squeeze(1).double().cumsum(-1)
    # The sum of a block and its last partial sum may differ by rounding.
    inside = torch.minimum(target - before, cdf[:, -1:] * (1 - 2.0**-53))
    index = torch.searchsorted(cdf, inside, right=True).clamp_(max=BLOCK - 1)
    return (block * BLOCK + index).squeeze(-1)


def truncated(probs: Tensor, top_p: Tensor | None, top_k: Tensor | None) -> Tensor:
    """Return the probabilities [n, V] with 0 for the tokens that top-k and top-p [n] exclude; the others keep
    theirs."""
    if top_p is None and top_k is None:
        return probs
    ranked, order = probs.sort(-1, descending=True)
    keep = torch.ones_like(ranked, dtype=torch.bool)
    if top_k is not None:
        limit = torch.where(top_k > 0, top_k, torch.full_like(top_k, probs.shape[-1]))
        keep &= torch.arange(probs.shape[-1], device=probs.device) < limit[:, None]
    if top_p is not None:
        # top-p applies to the probability mass that top-k has left, as in Hugging Face's warpers and vLLM. SGLang
        # applies it to the whole mass.
        left = ranked * keep
        before = left.cumsum(-1) - left
        # A row with top_p >= 1 keeps every token, even where rounding pushes the sum past 1, so that its draws do not
        # depend on the top_p of other rows.
        keep &= (before < top_p[:, None] * left.sum(-1, keepdim=True)) | (top_p >= 1)[:, None]
    keep[:, 0] = True
    return torch.zeros_like(probs).scatter(-1, order, ranked * keep)
