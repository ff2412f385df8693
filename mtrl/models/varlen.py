"""Attention of a packed row in one call of PyTorch's flash kernel, for half precision on a GPU.

A row of 16,384 tokens has about forty pieces. Their attention piece by piece is thousands of launches per layer stack,
during which the GPU waits for Python; the kernel takes the boundaries of all pieces instead (`cu_seqlens` of
FlashAttention-2, Dao 2023, 2307.08691). Its causal mask is aligned to the last key of a piece, so that the queries of a
piece also attend to the keys of its context, which are gathered in front of its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention.varlen import varlen_attn

LARGEST_HEAD = 256
"""Maximum width of a head in the kernel."""
OLDEST = (8, 0)
"""Oldest compute capability of the kernel: Ampere."""
_GQA = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
"""PyTorch 2.11 shares keys between heads without being asked, and later versions refuse it without this argument."""


@dataclass(frozen=True)
class Piece:
    """Consecutive tokens of a packed row that belong to one sample."""

    own: slice
    """The tokens of this piece."""
    context: tuple[slice, ...]
    """The tokens of earlier pieces that come before them in the sample, in order; empty for a whole sample."""


@dataclass(frozen=True)
class Boundaries:
    """The pieces of a packed row, for the kernel."""

    queries: Tensor
    """[pieces + 1] int32 first query of each piece, and their number."""
    keys: Tensor
    """[pieces + 1] int32 the same for the keys: those of the context and its own."""
    gathered: Tensor | None
    """[keys] int64 token of each key; None if the keys are the tokens, because no piece has a context."""
    most_queries: int
    """Number of queries of the longest piece."""
    most_keys: int
    """Number of keys of the piece with the most."""

    @classmethod
    def of(cls, pieces: Sequence[Piece], device: torch.device) -> Boundaries:
        """Return the boundaries of the pieces of one row."""
        parts = [(*piece.context, piece.own) for piece in pieces]
        queries = [_size(piece.own) for piece in pieces]
        keys = [sum(map(_size, spans)) for spans in parts]
        tokens = [torch.arange(span.start, span.stop) for spans in parts for span in spans]
        return cls(
            _ends(queries, device),
            _ends(keys, device),
            torch.cat(tokens).to(device) if len(tokens) > len(queries) else None,
            max(queries),
            max(keys),
        )


def fits(query: Tensor) -> bool:
    """Return whether the kernel supports queries [B, heads, L, dim] on this device."""
    half = query.dtype in (torch.bfloat16, torch.float16)
    if not (query.is_cuda and half and query.shape[3] <= LARGEST_HEAD and torch.version.hip is None):
        return False
    return torch.cuda.get_device_capability(query.device) >= OLDEST


def attend(query: Tensor, key: Tensor, value: Tensor, boundaries: Boundaries, scale: float | None) -> Tensor:
    """Return causal attention [1, L, heads, dim] of each piece to its context and itself.

    Args:
        query: [1, heads, L, dim].
        key, value: [1, kv_heads, L, dim].
        scale: factor of the scores; None: dim ** -0.5.
    """
    queries, keys, values = (states.squeeze(0).transpose(0, 1) for states in (query, key, value))
    if boundaries.gathered is not None:
        keys, values = (_Gathered.apply(states, boundaries.gathered) for states in (keys, values))
    return varlen_attn(
        queries,
        keys,
        values,
        boundaries.queries,
        boundaries.keys,
        boundaries.most_queries,
        boundaries.most_keys,
        scale=scale,
        window_size=(-1, 0),
        **_GQA,
    )[None]


class _Gathered(torch.autograd.Function):
    """Rows `index` of a tensor [L, heads, dim]. Gradients of rows that are gathered several times, such as those of a
    group's prompt, are added in float32."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.shape = states.shape
        return states.index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        total = torch.zeros(ctx.shape, dtype=torch.float32, device=gradient.device)
        return total.index_add_(0, index, gradient.float()).to(gradient.dtype), None


def _size(tokens: slice) -> int:
    return tokens.stop - tokens.start


def _ends(sizes: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *accumulate(sizes)], dtype=torch.int32, device=device)
