"""Samples to tensors: micro-batches under a token budget, padded or packed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from mtrl.types import Sample


@dataclass
class MicroBatch:
    """Samples in B rows of L tokens; the flat tensors hold their N sampled tokens, sample by sample."""

    token_ids: Tensor
    """[B, L] int64."""
    action_mask: Tensor
    """[B, L-1] bool: position i predicts token i+1, and that token was sampled."""
    position_ids: Tensor | None
    """[B, L] int64, from 0 again at each sample of a pack; None: 0 to L-1 in every row."""
    rollout_logprobs: Tensor
    """[N]"""
    advantages: Tensor
    """[N]"""
    weights: Tensor
    """[N] share of each token in the loss of the whole optimiser step."""
    versions: Tensor
    """[N] int64: policy version that sampled each token."""
    trajectory: Tensor
    """[N] int64: which trajectory a token belongs to, numbered from 0 within the micro-batch."""
    rows: list[int]
    """Index of each sample in the list that was batched; none: a filler, whose weights are all 0."""
    samples: list[Sample]
    """The samples themselves, in the same order; they stay with whoever made the batch."""

    @property
    def inputs(self) -> dict[str, Tensor]:
        """What the model reads: every token but the last of its row, [B, L-1], and the positions where they restart."""
        inputs = {"input_ids": self.token_ids[:, :-1]}
        if self.position_ids is not None:
            inputs["position_ids"] = self.position_ids[:, :-1]
        return inputs

    @property
    def targets(self) -> Tensor:
        """[N] the sampled ids."""
        return self.token_ids[:, 1:][self.action_mask]

    @property
    def is_filler(self) -> bool:
        """Nothing is learnt from it: a rank without work goes through it, since all ranks of a sharded model must."""
        return not self.rows

    def filler(self) -> MicroBatch:
        """The same tokens, weighing nothing."""
        return replace(self, weights=torch.zeros_like(self.weights), rows=[], samples=[])

    def to(self, device: torch.device) -> MicroBatch:
        """On this device."""
        return replace(
            self, **{name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)}
        )

    def without_samples(self) -> MicroBatch:
        """What another process needs of it."""
        return replace(self, samples=[])

    def gather(self, values: Sequence[ArrayLike | Tensor]) -> Tensor:
        """[N] float32 of this micro-batch, from the values of all samples that were batched.

        Args:
            values: per sample, one value per sampled token (lists, arrays or tensors of the sample's `action_tokens`).
        """
        return torch.cat([torch.as_tensor(values[row]) for row in self.rows]).to(self.weights)


Grid = tuple[NDArray[np.int64], NDArray[np.bool_], NDArray[np.int64] | None]
"""Token ids, loss mask and positions, each [B, L]; positions None: 0 to L-1 in every row."""


@dataclass(frozen=True)
class Layout:
    """How samples lie in the rows of a micro-batch: `PADDED` or `PACKED`."""

    deal: Callable[[Sequence[Sequence[int]], int], list[list[int]]]
    """(lengths of the samples of each unit, token budget) to the units of each micro-batch."""
    lay: Callable[[Sequence[Sample], Sequence[NDArray[np.bool_]]], Grid]
    """The samples of a micro-batch, and the loss mask of each, to its grid."""


def _deal_rows(lengths: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    """Units of similar width side by side, the widest first, so that little is padded."""
    plans: list[list[int]] = []
    rows = width = 0
    for unit in sorted(range(len(lengths)), key=lambda unit: -max(lengths[unit])):
        if plans and (rows + len(lengths[unit])) * width <= max_tokens:
            plans[-1].append(unit)
            rows += len(lengths[unit])
        else:
            plans.append([unit])
            rows, width = len(lengths[unit]), max(lengths[unit])
    return plans


def _pad(samples: Sequence[Sample], masks: Sequence[NDArray[np.bool_]]) -> Grid:
    """A row per sample, padded on the right."""
    width = max(len(sample.token_ids) for sample in samples)
    ids = np.zeros((len(samples), width), dtype=np.int64)
    mask = np.zeros((len(samples), width), dtype=bool)
    for row, sample in enumerate(samples):
        ids[row, : len(sample.token_ids)] = sample.token_ids
        mask[row, : len(sample.token_ids)] = masks[row]
    return ids, mask, None


def _deal_first_fit(lengths: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    """Each unit, the longest first, to the first pack that has room (first-fit decreasing: at most 11/9 of the fewest
    packs, and 1 more)."""
    sizes = np.minimum([sum(unit) for unit in lengths], max_tokens)  # what is longer fills a pack
    room = np.full(len(lengths), max_tokens)
    plans: list[list[int]] = [[] for _ in lengths]
    for unit in np.argsort(-sizes, kind="stable").tolist():
        pack = int(np.argmax(room >= sizes[unit]))
        plans[pack].append(unit)
        room[pack] -= sizes[unit]
    return [plan for plan in plans if plan]


def _pack(samples: Sequence[Sample], masks: Sequence[NDArray[np.bool_]]) -> Grid:
    """One row, the samples end to end."""
    ids = np.concatenate([_array(sample.token_ids, np.int64) for sample in samples])
    positions = np.concatenate([np.arange(len(sample.token_ids)) for sample in samples])
    return ids[None], np.concatenate(masks)[None], positions[None]


PADDED = Layout(_deal_rows, _pad)
"""A row per sample, filled up to the longest: for any causal model."""
PACKED = Layout(_deal_first_fit, _pack)
"""All samples end to end in one row. The model must keep them apart by their positions (`mtrl.models.packing`)."""


def micro_batches(
    samples: Sequence[Sample],
    weights: Sequence[np.ndarray],
    max_tokens: int,
    *,
    layout: Layout = PADDED,
    whole_trajectories: bool = False,
    ranks: int = 1,
) -> list[MicroBatch]:
    """Cut samples into micro-batches of at most `max_tokens` tokens, padding included.

    Args:
        weights: per sample, one weight per token of the sample (read where the mask is True).
        layout: `PADDED` or `PACKED`.
        whole_trajectories: keep all samples of a trajectory in one micro-batch, as what is registered with
            `per_trajectory` needs; else every sample goes where it fits.
        ranks: how many processes share them; their number is then a multiple of that, if there is enough to share.

    What is not cut, a sample or a whole trajectory, is a micro-batch of its own where it is longer than `max_tokens`.
    """
    units = _trajectories(samples) if whole_trajectories else [[index] for index in range(len(samples))]
    lengths = [[len(samples[index].token_ids) for index in unit] for unit in units]
    dealt = _divide(layout.deal(lengths, max_tokens), [sum(unit) for unit in lengths], ranks)
    plans = [[index for unit in plan for index in units[unit]] for plan in dealt]
    return [_collate([samples[i] for i in plan], [weights[i] for i in plan], plan, layout) for plan in plans]


def _divide(plans: list[list[int]], sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """Halve the largest micro-batches until `ranks` divides their number, or each holds one unit."""
    while len(plans) % ranks:
        largest = max(range(len(plans)), key=lambda i: (len(plans[i]) > 1, sum(sizes[unit] for unit in plans[i])))
        if len(plans[largest]) < 2:
            break
        whole = plans.pop(largest)
        half = _middle([sizes[unit] for unit in whole])
        plans += [whole[:half], whole[half:]]
    return plans


def _middle(sizes: Sequence[int]) -> int:
    """Where to cut so that both parts are about the same, and neither is empty."""
    sums = np.cumsum(sizes)
    return int(np.clip(np.abs(sums - sums[-1] / 2).argmin() + 1, 1, len(sizes) - 1))


def _collate(samples: list[Sample], weights: list[np.ndarray], rows: list[int], layout: Layout) -> MicroBatch:
    # In a pack the token before a sample's first one belongs to another sample.
    assert not any(sample.loss_mask[0] for sample in samples), "a sampled token needs context before it"
    chosen = [_array(sample.loss_mask, np.bool_) for sample in samples]
    ids, mask, positions = layout.lay(samples, chosen)

    def flat(values: Sequence[Sequence[float] | NDArray], dtype: type = np.float32) -> Tensor:
        parts = [_array(v, dtype)[c] for v, c in zip(values, chosen, strict=True)]
        return torch.from_numpy(np.concatenate(parts))

    numbers = np.empty(len(samples), dtype=np.int64)
    for number, unit in enumerate(_trajectories(samples)):
        numbers[unit] = number
    return MicroBatch(
        token_ids=torch.from_numpy(ids),
        action_mask=torch.from_numpy(mask[:, 1:]),
        position_ids=None if positions is None else torch.from_numpy(positions),
        rollout_logprobs=flat([sample.logprobs for sample in samples]),
        advantages=flat([sample.advantages for sample in samples]),
        weights=flat(weights),
        versions=flat([sample.versions for sample in samples], np.int64),
        trajectory=torch.from_numpy(np.repeat(numbers, [int(c.sum()) for c in chosen])),
        rows=rows,
        samples=samples,
    )


def _array(values: Sequence[float] | NDArray, dtype: type) -> NDArray:
    """Of a list twice as fast as `np.asarray`, which looks through it for what it holds first."""
    if isinstance(values, np.ndarray):
        return values.astype(dtype, copy=False)
    return np.fromiter(values, dtype, len(values))


def _trajectories(samples: Sequence[Sample]) -> list[list[int]]:
    """The samples of each trajectory, by their indices, in order of appearance."""
    units: dict[tuple[str, int], list[int]] = {}
    for index, sample in enumerate(samples):
        units.setdefault((sample.group_id, sample.trajectory), []).append(index)
    return list(units.values())
