"""Draws of one token per row from its probabilities, and the limits of top-p and top-k."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

LARGE = 8192
"""Minimum size of a vocabulary from which tokens are drawn in blocks."""
BLOCK = 128
"""Number of tokens in a block; it divides the vocabularies of most models."""


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
        # top-p applies to the probability mass that top-k has left, as in Hugging Face's warpers, vLLM and SGLang.
        left = ranked * keep
        before = left.cumsum(-1) - left
        # A row with top_p >= 1 keeps every token, even where rounding pushes the sum past 1, so that its draws do not
        # depend on the top_p of other rows.
        keep &= (before < top_p[:, None] * left.sum(-1, keepdim=True)) | (top_p >= 1)[:, None]
    keep[:, 0] = True
    return torch.zeros_like(probs).scatter(-1, order, ranked * keep)
