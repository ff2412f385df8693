"""The tensors of a checkpoint: every rank writes its shards, and any number of ranks can read them.

`torch.distributed.checkpoint` plans the writes and reads of each rank: shards of one tensor never overlap and cover it,
and replicas are written once, with the work divided over the ranks that hold them. Its storage classes are not used:
one stores its index in a pickle, which may run code when it is read; the one for safetensors has no index, so that a
lost file is not noticed. Here the index is JSON. Each part (the text before the first dot of a name) has a separate
file on each rank, and the rest of the name is the key in it: `model.safetensors` of a single process holds the names of
the module.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import safetensors
import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, LoadPlanner, ReadItem, SavePlan
from torch.distributed.checkpoint.metadata import MetadataIndex

from mtrl.errors import UserError
from mtrl.record.checksums import add_checksums, checksums, damage
from mtrl.trainer.checkpoint.checkpoint import INDEX, not_written, sync_folder, unreadable
from mtrl.trainer.checkpoint.index import (
    Index,
    file_of,
    index_of,
    key_of,
    metadata_of,
    read_index,
    write_index,
)

T = TypeVar("T")

BROKEN = (OSError, safetensors.SafetensorError)
"""Exceptions for errors of the disk, directly or through safetensors."""


@dataclass
class Shards:
    """A rank's share of named tensors, copied to CPU memory, so that training can continue while they are written."""

    plan: SavePlan
    tensors: dict[MetadataIndex, Tensor]
    """Copies, by name and offset within the whole tensor."""

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Shards:
        """Copy this rank's data: the shard of a DTensor, or the whole of any other tensor.

        Each copy has its own storage, because the local engine lets parameters share storage.
        """
        for name in tensors:
            key_of(name)
        planner = _save_planner()
        planner.set_up_planner(dict(tensors), is_coordinator=True)
        plan = planner.create_local_plan()
        return cls(plan, {item.index: _copied(planner.resolve_data(item)) for item in plan.items})


def write_shards(shards: Shards, folder: Path, group: dist.ProcessGroup | None = None) -> None:
    """Write the shards of named tensors into a folder. All ranks of `group` must call it.

    Args:
        shards: shards of this rank, of tensors with the same names, PART.NAME, on every rank. DTensors are written
            shard by shard; other tensors must be equal on every rank.
        group: gloo group without other use during the call; None: a single process.

    Raises:
        UserError: a rank could not write. Every rank raises it, and the folder is deleted.
    """
    ranks = _Ranks(group)
    plans = ranks.gather(shards.plan)
    index, shares = assign_shards(plans) if plans else ({}, None)
    share = ranks.scatter(shares)
    written: dict[str, str] = {}
    outcomes = ranks.gather((_failure(_write_share, shards, share, folder, ranks, written), written))
    verdict = None
    if outcomes:
        errors = (f"rank {rank}: {text}" if ranks.size > 1 else text for rank, (text, _) in enumerate(outcomes) if text)
        sums = {name: digest for _, share_sums in outcomes for name, digest in share_sums.items()}
        verdict = next(errors, None) or _failure(_write_index, index, sums, folder)
    if verdict := ranks.scatter([verdict] * ranks.size):
        if ranks.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
        raise not_written(folder, verdict)


def assign_shards(plans: Sequence[SavePlan]) -> tuple[Index, list[list[MetadataIndex]]]:
    """Return the index of all tensors, and the shards that each rank writes, from the plans of all ranks.

    Raises:
        ValueError: shards overlap, or do not cover their tensor.
    """
    planned, _ = _save_planner().create_global_plan(list(plans))
    return index_of(planned), [[item.index for item in plan.items] for plan in planned]


def tensor_names(folder: Path) -> list[str]:
    """Return the names of the tensors in a checkpoint.

    Raises:
        UserError: the checkpoint cannot be read.
    """
    return list(read_index(folder))


def read_tensors(folder: Path, part: str) -> dict[str, Tensor]:
    """Return all tensors of one part, whole and on the CPU, by their names without the part. For a single process.

    Raises:
        UserError: the checkpoint cannot be read, or a file is damaged.
    """
    index = {name: stored for name, stored in read_index(folder).items() if name.partition(".")[0] == part}
    files = {chunk.file for stored in index.values() for chunk in stored.chunks}
    if reason := damage(folder, [INDEX, *files]):
        raise unreadable(folder, reason)
    into = {name: torch.empty(stored.shape, dtype=getattr(torch, stored.dtype)) for name, stored in index.items()}
    load_tensors(into, folder)
    return {key_of(name): tensor for name, tensor in into.items()}


def load_tensors(into: Mapping[str, Tensor], folder: Path) -> None:
    """Fill tensors in place from a checkpoint of any number of ranks; each rank reads its own shards independently.

    Checksums are not compared here, since a run that resumes has read the checkpoint by `read_checkpoint`, which does.

    Args:
        into: all tensors of some parts of the checkpoint; its other parts are ignored. Values are cast if the dtypes
            differ.

    Raises:
        UserError: names are missing or unexpected, a shape differs, or a file cannot be read.
    """
    index = read_index(folder)
    _refuse_misfit(into, index, folder)
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(into), metadata_of(index), is_coordinator=True)
    files = {MetadataIndex(name, chunk.offsets): chunk.file for name in into for chunk in index[name].chunks}
    by_file: dict[str, list[ReadItem]] = defaultdict(list)
    for item in planner.create_local_plan().items:
        by_file[files[item.storage_index]].append(item)
    for file, items in by_file.items():
        try:
            _read_items(folder / file, items, planner)
        except (*BROKEN, ValueError, RuntimeError) as error:
            raise unreadable(folder, f"{file}: {error}") from error


def _read_items(path: Path, items: Sequence[ReadItem], planner: LoadPlanner) -> None:
    with safetensors.safe_open(path, framework="pt") as file:
        for item in items:
            stored = file.get_slice(key_of(item.storage_index.fqn))
            spans = zip(item.storage_offsets, item.lengths, strict=True)
            piece = stored[tuple(slice(start, start + length) for start, length in spans)]
            target = planner.resolve_tensor(item).detach()
            if piece.shape != target.shape:
                raise ValueError(f"{item.storage_index.fqn} is smaller than it should be")
            target.copy_(piece)


def _refuse_misfit(into: Mapping[str, Tensor], index: Index, folder: Path) -> None:
    parts = {name.partition(".")[0] for name in into}
    found = {name for name in index if name.partition(".")[0] in parts}
    shapes = [name for name in into if name in index and list(into[name].shape) != index[name].shape]
    wrong = {
        "missing:": sorted(into.keys() - found),
        "unexpected:": sorted(found - into.keys()),
        "other shapes:": [f"{n} {tuple(index[n].shape)} for {tuple(into[n].shape)}" for n in shapes],
    }
    misfits = [f"{what} {_few(names)}" for what, names in wrong.items() if names]
    if misfits:
        raise UserError(
            f"checkpoint {folder} does not fit the model and the settings: {'; '.join(misfits)}; continue it with "
            "those that it was written with, or give another checkpoint"
        )


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    return ", ".join(names[:2]) + more


def _write_share(
    shards: Shards, share: Sequence[MetadataIndex], folder: Path, ranks: _Ranks, sums: dict[str, str]
) -> None:
    """Write the files of this rank, and add their checksums to `sums`."""
    if not folder.is_dir():
        raise FileNotFoundError(errno.ENOENT, "the folder is not there; all ranks need a file system that they share")
    files: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for index in share:
        files[file_of(index.fqn, ranks.rank, ranks.size)][key_of(index.fqn)] = shards.tensors[index]
    for name, tensors in files.items():
        write_tensors(folder / name, tensors)
    sums.update(checksums(folder, files))


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write a file without a second copy in memory, and flush it to the disk (fsync)."""
    safetensors.torch.save_file(tensors, path, {"format": "pt"})
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _write_index(index: Index, sums: Mapping[str, str], folder: Path) -> None:
    write_index(index, folder)
    add_checksums(folder, {**sums, **checksums(folder, [INDEX])})
    sync_folder(folder)


def _failure(work: Callable[..., None], *arguments: Any) -> str | None:
    """Call `work` and return the message of an error of the disk; None without an error."""
    try:
        work(*arguments)
    except BROKEN as error:
        return (isinstance(error, OSError) and error.strerror) or str(error)
    return None


def _copied(tensor: Any) -> Tensor:
    return tensor.detach().to("cpu", memory_format=torch.contiguous_format, copy=True)


def _save_planner() -> DefaultSavePlanner:
    return DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)


class _Ranks:
    """Exchange of objects between all ranks and the leader over one group; without a group, a single process."""

    def __init__(self, group: dist.ProcessGroup | None):
        self.group = group
        self.rank, self.size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))

    def gather(self, value: T) -> list[T] | None:
        """Return the values of all ranks on the leader, None on other ranks."""
        if self.group is None:
            return [value]
        values: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(value, values, group=self.group, group_dst=0)
        return values

    def scatter(self, values: Sequence[Any] | None) -> Any:
        """Return this rank's entry of the leader's values."""
        if self.group is None:
            assert values is not None
            return values[0]
        received = [None]
        sent = list(values) if values is not None and self.rank == 0 else None
        dist.scatter_object_list(received, sent, group=self.group, group_src=0)
        return received[0]
