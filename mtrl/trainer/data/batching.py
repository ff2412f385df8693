"""Batching: mini-batches of whole groups, one for each optimiser step; their conversion to micro-batches of tensors
under a token budget, padded or packed; and the distribution of micro-batches to ranks."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from mtrl.config.trainer_schema import TrainerConfig
from mtrl.models.packing import Row, pack, partition, shared_prefixes
from mtrl.trainer.data.experts import compared_rows, experts_in
from mtrl.trainer.flops import ModelFlops
from mtrl.types import Sample, TopTokens


@dataclass
class MicroBatch:
    """Samples in B rows of L tokens; the flat tensors hold their N sampled tokens, sample by sample."""

    token_ids: Tensor
    """[B, L] int64 token ids."""
    action_mask: Tensor
    """[B, L-1] bool: True at position i if token i+1, which it predicts, was sampled."""
    position_ids: Tensor | None
    """[B, L] int64, from 0 again at each sample of a pack, or from the length of the prefix that it shares with the
    sample before it; None: 0 to L-1 in every row."""
    boundaries: Tensor | None
    """[S+1] int32 first index of each of the S samples of a pack in `inputs`, and their length; None without packing,
    and for packs that share prefixes."""
    longest: int
    """Number of tokens of the longest sample between `boundaries`."""
    rollout_logprobs: Tensor
    """[N] log-probs that the engine reported."""
    advantages: Tensor
    """[N] advantages."""
    weights: Tensor
    """[N] share of each token in the loss of the whole optimiser step."""
    versions: Tensor
    """[N] int64 policy version that sampled each token."""
    trajectory: Tensor
    """[N] int64 index of the trajectory of each token, from 0 within the micro-batch."""
    teacher_ids: Tensor
    """[N, k] int64 ids of the teacher's most probable tokens; k is 0 without `distillation.top_k`."""
    teacher_logprobs: Tensor
    """[N, k] their log-probs under the teacher."""
    experts: Tensor | None
    """[B, L-1, layers, k] ids of the experts that computed each input when the engine sampled the token after it; -1
    where they are unknown, None without router replay."""
    rows: list[int]
    """Index of each sample in the list that was batched; empty for a filler, whose weights are all 0."""
    samples: list[Sample]
    """The samples themselves, in the same order; they stay in the process that made the batch."""
    tokens_of_step: int
    """Number of sampled tokens of the whole optimiser step."""

    @property
    def inputs(self) -> dict[str, Tensor]:
        """Inputs of the model: all tokens except the last of each row, [B, L-1], and the positions of a pack."""
        inputs = {"input_ids": self.token_ids[:, :-1]}
        if self.position_ids is not None:
            inputs["position_ids"] = self.position_ids[:, :-1]
        return inputs

    @property
    def flash_inputs(self) -> dict[str, Any]:
        """`inputs`, and the boundaries of a pack for flash kernels. Without them Transformers searches the positions
        in every layer, and each search waits for the GPU."""
        if self.boundaries is None:
            return dict(self.inputs)
        starts = {"cu_seq_lens_q": self.boundaries, "cu_seq_lens_k": self.boundaries}
        return {**self.inputs, **starts, "max_length_q": self.longest, "max_length_k": self.longest}

    @property
    def targets(self) -> Tensor:
        """[N] ids of the sampled tokens."""
        return self.token_ids[:, 1:][self.action_mask]

    @property
    def is_filler(self) -> bool:
        """Whether this is a filler without effect on the weights, for a rank without work: all ranks of a sharded model
        must make the same passes."""
        return not self.rows

    def filler(self) -> MicroBatch:
        """Return a filler: the same tokens with weights of 0."""
        return replace(self, weights=torch.zeros_like(self.weights), rows=[], samples=[])

    def to(self, device: torch.device) -> MicroBatch:
        """Return the micro-batch with its tensors on this device."""
        return replace(
            self, **{name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)}
        )

    def without_samples(self) -> MicroBatch:
        """Return the micro-batch without samples, to be sent to another process."""
        return replace(self, samples=[])

    def gather(self, values: Sequence[ArrayLike | Tensor]) -> Tensor:
        """Return the values [N] of this micro-batch's tokens, in the dtype of `weights`, from the values of all samples
        that were batched.

        Args:
            values: per sample, one value per sampled token (lists, arrays or tensors of length `action_tokens`).
        """
        return torch.cat([torch.as_tensor(values[row]) for row in self.rows]).to(self.weights)


class Grid(NamedTuple):
    """The arrays of a micro-batch, each [B, L]."""

    ids: NDArray[np.int64]
    mask: NDArray[np.bool_]
    """Loss mask."""
    positions: NDArray[np.int64] | None
    """None: 0 to L-1 in every row."""
    starts: Sequence[int]
    """For each sample, the number of tokens at its start that are left out."""


@dataclass(frozen=True)
class RowLayout:
    """Arrangement of samples in the rows of a micro-batch: `PADDED`, `PACKED` or `SHARED`."""

    partition: Callable[[Sequence[Sequence[Sample]], int], list[list[int]]]
    """Function from the samples of each unit, and the token budget, to the indices of the units of each
    micro-batch."""
    build_grid: Callable[[Sequence[Sample], Sequence[NDArray[np.bool_]]], Grid]
    """Function from the samples of a micro-batch, and the loss mask of each, to the grid."""


def _lengths(units: Sequence[Sequence[Sample]]) -> list[list[int]]:
    return [[len(sample.token_ids) for sample in unit] for unit in units]


def _partition_by_width(units: Sequence[Sequence[Sample]], max_tokens: int) -> list[list[int]]:
    """Assign units of similar width to the same micro-batch, the widest first, so that there is little padding."""
    lengths = _lengths(units)
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
    """Return a grid with a row per sample, padded on the right."""
    width = max(len(sample.token_ids) for sample in samples)
    ids = np.zeros((len(samples), width), dtype=np.int64)
    mask = np.zeros((len(samples), width), dtype=bool)
    for row, sample in enumerate(samples):
        ids[row, : len(sample.token_ids)] = sample.token_ids
        mask[row, : len(sample.token_ids)] = masks[row]
    return Grid(ids, mask, None, [0] * len(samples))


def _partition_first_fit(units: Sequence[Sequence[Sample]], max_tokens: int) -> list[list[int]]:
    """Assign each unit, the longest first, to the first pack that has room (first-fit decreasing: at most 11/9 of the
    smallest possible number of packs, plus 1)."""
    lengths = _lengths(units)
    sizes = np.minimum([sum(unit) for unit in lengths], max_tokens)  # a longer unit fills a pack alone
    room = np.full(len(lengths), max_tokens)
    plans: list[list[int]] = [[] for _ in lengths]
    for unit in np.argsort(-sizes, kind="stable").tolist():
        pack = int(np.argmax(room >= sizes[unit]))
        plans[pack].append(unit)
        room[pack] -= sizes[unit]
    return [plan for plan in plans if plan]


def _rows(samples: Sequence[Sample], masks: Sequence[NDArray[np.bool_]]) -> list[Row]:
    return [(_array(sample.token_ids, np.int64), mask) for sample, mask in zip(samples, masks, strict=True)]


def _pack(samples: Sequence[Sample], masks: Sequence[NDArray[np.bool_]]) -> Grid:
    """Return a grid of one row with the samples concatenated."""
    starts = [0] * len(samples)
    return Grid(*pack(_rows(samples, masks), starts), starts)


def _partition_by_prefix(units: Sequence[Sequence[Sample]], max_tokens: int) -> list[list[int]]:
    """Assign units with a common prefix to the same pack, where the prefix counts once."""
    rows = [_rows(unit, [_array(sample.loss_mask, np.bool_) for sample in unit]) for unit in units]
    return partition([compared_rows(unit, own) for unit, own in zip(units, rows, strict=True)], max_tokens)


def _pack_shared(samples: Sequence[Sample], masks: Sequence[NDArray[np.bool_]]) -> Grid:
    """Return a grid of one row with the samples concatenated, without shared prefixes."""
    rows = _rows(samples, masks)
    starts = shared_prefixes(compared_rows(samples, rows))
    return Grid(*pack(rows, starts), starts)


PADDED = RowLayout(_partition_by_width, _pad)
"""Layout with a row per sample, padded to the longest sample; it works with any causal model."""
PACKED = RowLayout(_partition_first_fit, _pack)
"""Layout with all samples concatenated in one row. The model must keep them apart by their positions
(`mtrl.models.preparation`)."""
SHARED = RowLayout(_partition_by_prefix, _pack_shared)
"""Layout like `PACKED` in which common prefixes, such as the prompt of a group, are stored and computed once. It needs
the attention of `mtrl.models.attention`."""


def mini_batches(samples: Sequence[Sample], config: TrainerConfig, seed: int, step: int) -> list[list[Sample]]:
    """Divide the samples into `mini_batches` parts of whole groups, in another random order in each of `update_epochs`
    passes. Return the parts of all passes."""
    if config.mini_batches == 1 and config.update_epochs == 1:
        return [list(samples)]
    groups = list(dict.fromkeys(sample.group_id for sample in samples))
    parts = []
    for epoch in range(config.update_epochs):
        random.Random(f"{seed}/{step}/{epoch}").shuffle(groups)
        for part in range(config.mini_batches):
            chosen = set(groups[part :: config.mini_batches])
            parts.append([sample for sample in samples if sample.group_id in chosen])
    return parts


def micro_batches(
    samples: Sequence[Sample],
    weights: Sequence[np.ndarray],
    max_tokens: int,
    *,
    layout: RowLayout = PADDED,
    whole_trajectories: bool = False,
    ranks: int = 1,
) -> list[MicroBatch]:
    """Divide samples into micro-batches of at most `max_tokens` tokens, padding included.

    Args:
        weights: per sample, one weight per token of the sample (read where the mask is True).
        layout: `PADDED` or `PACKED`.
        whole_trajectories: keep all samples of a trajectory in one micro-batch, as losses and corrections registered
            with `per_trajectory` need; else the samples of a trajectory may be in different micro-batches.
        ranks: number of ranks, or of groups of ranks that share sequences, among which the micro-batches are divided.
            The number of micro-batches is then a multiple of it, unless there are too few samples.

    An indivisible unit (a sample or a whole trajectory) that is longer than `max_tokens` gets its own micro-batch.
    """
    units = _trajectories(samples) if whole_trajectories else [[index] for index in range(len(samples))]
    members = [[samples[index] for index in unit] for unit in units]
    unit_plans = _divide(layout.partition(members, max_tokens), [sum(unit) for unit in _lengths(members)], ranks)
    plans = [[index for unit in plan for index in units[unit]] for plan in unit_plans]
    total = sum(sample.action_tokens for sample in samples)
    return [_collate([samples[i] for i in plan], [weights[i] for i in plan], plan, layout, total) for plan in plans]


def cost(batch: MicroBatch, model: ModelFlops) -> float:
    """Return the FLOPs of a forward and a backward pass over a micro-batch, padding included."""
    if batch.position_ids is None:
        rows, width = batch.token_ids.shape
        return model.training([width] * rows, len(batch.weights))
    starts, ends = spans(batch.position_ids)
    return model.training(ends, len(batch.weights)) - model.training(starts, 0)


def spans(positions: Tensor) -> tuple[list[int], list[int]]:
    """Return the first position, and the last position plus 1, of each piece of a pack; a piece that shares a prefix of
    s tokens begins at position s."""
    row = positions[0]
    jumps = (row[1:] != row[:-1] + 1).nonzero().flatten()
    last = torch.cat([jumps, jumps.new_tensor([len(row) - 1])])
    first = torch.cat([jumps.new_zeros(1), jumps + 1])
    return row[first].tolist(), (row[last] + 1).tolist()


def balance(batches: Sequence[MicroBatch], ranks: int, model: ModelFlops) -> list[list[MicroBatch]]:
    """Return the micro-batches of each rank, or group of ranks that share sequences: the same number for every rank,
    with similar costs in the same round.

    Ranks of a sharded model synchronise at every layer, so a round takes as long as its costliest micro-batch.
    Therefore micro-batches that are adjacent in the order of cost share a round. Ranks without a micro-batch in the
    last round get a filler.
    """
    if ranks == 1:
        return [list(batches)]
    ordered = sorted(batches, key=lambda batch: -cost(batch, model))
    assignments: list[list[MicroBatch]] = [[] for _ in range(ranks)]
    assigned_cost = [0.0] * ranks
    for start in range(0, len(ordered), ranks):
        round_batches = ordered[start : start + ranks]
        padded_round = [*round_batches, *[round_batches[-1].filler()] * (ranks - len(round_batches))]
        # The costliest micro-batch of a round goes to the rank with the lowest cost so far.
        for rank, batch in zip(sorted(range(ranks), key=assigned_cost.__getitem__), padded_round, strict=True):
            assignments[rank].append(batch)
            assigned_cost[rank] += cost(batch, model)
    return assignments


def _divide(plans: list[list[int]], sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """Split the largest micro-batches in halves until `ranks` divides their number, or each holds one unit."""
    while len(plans) % ranks:
        largest = max(range(len(plans)), key=lambda i: (len(plans[i]) > 1, sum(sizes[unit] for unit in plans[i])))
        if len(plans[largest]) < 2:
            break
        whole = plans.pop(largest)
        half = _middle([sizes[unit] for unit in whole])
        plans += [whole[:half], whole[half:]]
    return plans


def _middle(sizes: Sequence[int]) -> int:
    """Return the index that splits `sizes` into two parts of about equal sum, neither of them empty."""
    sums = np.cumsum(sizes)
    return int(np.clip(np.abs(sums - sums[-1] / 2).argmin() + 1, 1, len(sizes) - 1))


def _collate(
    samples: list[Sample], weights: list[np.ndarray], rows: list[int], layout: RowLayout, tokens_of_step: int
) -> MicroBatch:
    # In a pack, the token before a sample's first token belongs to another sample.
    assert not any(sample.loss_mask[0] for sample in samples), "a sampled token needs context before it"
    chosen = [_array(sample.loss_mask, np.bool_) for sample in samples]
    ids, mask, positions, starts = layout.build_grid(samples, chosen)
    experts = experts_in(samples, ids.shape, starts)

    def flat(values: Sequence[Sequence[float] | NDArray], dtype: type = np.float32) -> Tensor:
        parts = [_array(v, dtype)[c] for v, c in zip(values, chosen, strict=True)]
        return torch.from_numpy(np.concatenate(parts))

    numbers = np.empty(len(samples), dtype=np.int64)
    for number, unit in enumerate(_trajectories(samples)):
        numbers[unit] = number
    boundaries = None if positions is None else _boundaries(positions[0, :-1])
    teachers = [sample.teacher or _no_top_tokens(sample.action_tokens) for sample in samples]
    return MicroBatch(
        token_ids=torch.from_numpy(ids),
        action_mask=torch.from_numpy(mask[:, 1:]),
        position_ids=None if positions is None else torch.from_numpy(positions),
        boundaries=None if boundaries is None else torch.from_numpy(boundaries),
        longest=0 if boundaries is None else int(np.diff(boundaries).max()),
        rollout_logprobs=flat([sample.logprobs for sample in samples]),
        advantages=flat([sample.advantages for sample in samples]),
        weights=flat(weights),
        versions=flat([sample.versions for sample in samples], np.int64),
        trajectory=torch.from_numpy(np.repeat(numbers, [int(c.sum()) for c in chosen])),
        teacher_ids=torch.from_numpy(np.concatenate([top.ids for top in teachers])),
        teacher_logprobs=torch.from_numpy(np.concatenate([top.logprobs for top in teachers])).float(),
        experts=None if experts is None else torch.from_numpy(experts[:, 1:]),
        rows=rows,
        samples=samples,
        tokens_of_step=tokens_of_step,
    )


def _no_top_tokens(count: int) -> TopTokens:
    return TopTokens(np.zeros((count, 0), dtype=np.int64), np.zeros((count, 0)))


def _boundaries(positions: NDArray[np.int64]) -> NDArray[np.int32] | None:
    """Return where the samples of a pack begin, and its length; None if a sample continues the one before it.

    Args:
        positions: [L] positions of the tokens that are inputs of the model.
    """
    starts = np.flatnonzero(np.diff(positions, prepend=-2) != 1)
    return None if positions[starts].any() else np.append(starts, len(positions)).astype(np.int32)


def _array(values: Sequence[float] | NDArray, dtype: type) -> NDArray:
    """Convert values to a 1-D array. `np.fromiter` with a known dtype is twice as fast as `np.asarray` on a list, which
    first scans the list to infer the dtype."""
    if isinstance(values, np.ndarray):
        return values.astype(dtype, copy=False)
    return np.fromiter(values, dtype, len(values))


def _trajectories(samples: Sequence[Sample]) -> list[list[int]]:
    """Return the indices of the samples, grouped by trajectory, in order of first appearance."""
    units: dict[tuple[str, int], list[int]] = {}
    for index, sample in enumerate(samples):
        units.setdefault((sample.group_id, sample.trajectory), []).append(index)
    return list(units.values())
