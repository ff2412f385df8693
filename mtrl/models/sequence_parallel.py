"""Sequence parallelism: the ranks of a group hold the parts of the same sequences.

All of a transformer but attention computes token by token. A rank therefore computes its part of the tokens, and an
all-to-all before attention exchanges tokens for heads: each rank attends from all tokens to all tokens, for its share
of the heads. A second all-to-all returns each token's results to its rank (DeepSpeed-Ulysses, Jacobs et al. 2023,
2309.14509). Attention is thus computed for whole sequences, with the boundaries of packs, and with an equal share of
the work on every rank; the activations of a rank are those of its part.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclass(frozen=True)
class SequenceGroup:
    """The ranks that hold the parts of the same sequences, in the order of the parts."""

    process_group: dist.ProcessGroup

    @property
    def size(self) -> int:
        """Number of ranks, and of parts of a sequence."""
        return self.process_group.size()

    @property
    def rank(self) -> int:
        """Index of this rank's part."""
        return self.process_group.rank()

    def join(self, values: Tensor, own: Tensor) -> Tensor:
        """Return the values of all ranks, [N, ...], on each rank.

        The backward pass takes this rank's rows of the gradient and communicates with no rank: every rank must compute
        the same function of the result.

        Args:
            values: [n, ...] values of this rank.
            own: [N] bool mask of this rank's rows; each row belongs to one rank.
        """
        return _Joined.apply(values, own, self.process_group)


@dataclass(frozen=True, eq=False)
class HeadExchange:
    """The attention of the parts of B sequences of L tokens: the argument `head_exchange` of a model's forward, which
    the model passes to its attention (`mtrl.models.attention`)."""

    group: SequenceGroup
    positions: Tensor
    """[B, L] positions of the whole sequences."""

    def attend(
        self,
        attention: Callable[..., Tensor],
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        **kwargs: Any,
    ) -> Tensor:
        """Return the attention [B, L / size, heads, dim] of this rank's tokens to all tokens.

        Keys and values are repeated if the number of their heads is not a multiple of the number of ranks.

        Args:
            attention: function of whole sequences with the arguments of this method, from the states of some heads
                [B, heads, L, dim] to their attention [B, L, heads, dim].
            query, key, value: [B, heads, L / size, dim] states of this rank's tokens; the number of query heads is a
                multiple of the number of ranks.
            mask: must be None.
        """
        if mask is not None:
            raise ValueError("the parts of sequences are padded on the right and take no attention mask")
        copies = math.lcm(key.shape[1], self.group.size) // key.shape[1]
        if copies > 1:
            key, value = (states.repeat_interleave(copies, 1) for states in (key, value))
        query, key, value = self._to_heads(query, key, value)
        shape = SimpleNamespace(
            is_causal=getattr(module, "is_causal", True), num_key_value_groups=query.shape[1] // key.shape[1]
        )
        return self._to_tokens(attention(shape, query, key, value, None, **{**kwargs, "position_ids": self.positions}))

    def _to_heads(self, *states: Tensor) -> list[Tensor]:
        """Return states [B, heads / size, L, dim] from states [B, heads, L / size, dim], in one collective."""
        size = self.group.size
        by_rank = [part.unflatten(1, (size, -1)).transpose(0, 1) for part in states]  # [rank, B, heads, tokens, dim]
        sent = torch.cat([part.flatten(1) for part in by_rank], 1)
        received = _Exchanged.apply(sent, self.group.process_group).split([part[0].numel() for part in by_rank], 1)
        return [
            part.view(like.shape).permute(1, 2, 0, 3, 4).flatten(2, 3)
            for part, like in zip(received, by_rank, strict=True)
        ]

    def _to_tokens(self, attended: Tensor) -> Tensor:
        """Return results [B, L / size, heads, dim] from results [B, L, heads / size, dim]."""
        by_rank = attended.unflatten(1, (self.group.size, -1)).transpose(0, 1)  # [rank, B, tokens, heads, dim]
        received = _Exchanged.apply(by_rank.contiguous(), self.group.process_group)
        return received.permute(1, 2, 0, 3, 4).flatten(2, 3)


class _Exchanged(torch.autograd.Function):
    """All-to-all: row i of a tensor [size, ...] is sent to rank i, and row i of the result comes from rank i. It is its
    own inverse, and its own transpose."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, process_group: dist.ProcessGroup) -> Tensor:
        ctx.process_group = process_group
        return _exchange(rows, process_group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _exchange(gradient.contiguous(), ctx.process_group), None


class _Joined(torch.autograd.Function):
    """`SequenceGroup.join`: the sum over ranks of tensors in which the rows of other ranks are 0."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, own: Tensor, process_group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(own)
        whole = values.new_zeros(len(own), *values.shape[1:])
        whole[own] = values
        dist.all_reduce(whole, group=process_group)
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (own,) = ctx.saved_tensors
        return gradient[own], None, None


def _exchange(rows: Tensor, process_group: dist.ProcessGroup) -> Tensor:
    received = torch.empty_like(rows)
    dist.all_to_all_single(received, rows, group=process_group)
    return received
