"""`tensors.json` of a checkpoint: the chunks of each tensor, and the file of each chunk."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path

import torch
from torch.distributed.checkpoint import Metadata, SavePlan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata

from mtrl.trainer.checkpoint.checkpoint import INDEX, refuse_older, unreadable, write_file


@dataclass
class Chunk:
    """A part of a tensor, in one file."""

    file: str
    offsets: list[int]
    """Start of the chunk within the whole tensor, per dimension."""
    sizes: list[int]

    def lies_in(self, shape: Sequence[int]) -> bool:
        """Return whether the chunk lies within a tensor of this shape."""
        if not (_are_counts(self.offsets) and _are_counts(self.sizes)):
            return False
        if not len(self.offsets) == len(self.sizes) == len(shape):
            return False
        return all(start + size <= whole for start, size, whole in zip(self.offsets, self.sizes, shape, strict=True))

    def overlaps(self, other: Chunk) -> bool:
        """Return whether two chunks have cells in common."""
        spans = zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        return all(start < begin + width and begin < start + size for start, size, begin, width in spans)


@dataclass
class StoredTensor:
    """A tensor of a checkpoint."""

    dtype: str
    """Name of the dtype in PyTorch, such as `float32`."""
    shape: list[int]
    chunks: list[Chunk] = field(default_factory=list)

    def metadata(self) -> TensorStorageMetadata:
        """Return the metadata of the tensor for PyTorch's planners."""
        chunks = [ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in self.chunks]
        properties = TensorProperties(dtype=getattr(torch, self.dtype))
        return TensorStorageMetadata(properties, torch.Size(self.shape), chunks)

    def check(self) -> None:
        """Check the entry.

        Raises:
            ValueError: the dtype or a shape is invalid, or the chunks do not cover the tensor exactly.
        """
        if not isinstance(getattr(torch, self.dtype, None), torch.dtype):
            raise ValueError(f"{self.dtype} is no dtype")
        if not _are_counts(self.shape) or not all(chunk.lies_in(self.shape) for chunk in self.chunks):
            raise ValueError("a chunk lies outside of its tensor")
        ordered = sorted(self.chunks, key=lambda chunk: chunk.offsets)
        cells = sum(math.prod(chunk.sizes) for chunk in ordered)
        if cells != math.prod(self.shape) or any(one.overlaps(other) for one, other in pairwise(ordered)):
            raise ValueError("its chunks are not the whole tensor")
        for chunk in self.chunks:
            if Path(chunk.file).name != chunk.file:
                raise ValueError(f"{chunk.file} is not in the folder of the checkpoint")


def _are_counts(numbers: object) -> bool:
    return isinstance(numbers, list) and all(type(number) is int and number >= 0 for number in numbers)


Index = dict[str, StoredTensor]
"""Tensors of a checkpoint, by name."""


def index_of(plans: Sequence[SavePlan]) -> Index:
    """Return the index of the tensors of a global plan, which has one plan per rank."""
    index: Index = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            data, name = item.tensor_data, item.index.fqn
            assert data is not None and data.chunk is not None
            stored = index.setdefault(
                name, StoredTensor(str(data.properties.dtype).removeprefix("torch."), list(data.size))
            )
            file = file_of(name, rank, len(plans))
            stored.chunks.append(Chunk(file, list(data.chunk.offsets), list(data.chunk.sizes)))
    return index


def file_of(name: str, rank: int, ranks: int) -> str:
    """Return the name of the file in which `rank` of `ranks` stores its chunks of a tensor: `model.safetensors`,
    `model-rank3.safetensors`."""
    part = name.partition(".")[0]
    return f"{part}.safetensors" if ranks == 1 else f"{part}-rank{rank}.safetensors"


def key_of(name: str) -> str:
    """Return the key of a tensor within its file, for a name PART.NAME.

    Raises:
        ValueError: the name does not have this form.
    """
    part, _, key = name.partition(".")
    if not (part and key):
        raise ValueError(f"{name!r} is not the name of a tensor of a checkpoint, PART.NAME")
    return key


def write_index(index: Index, folder: Path) -> None:
    """Write the index, with one line per tensor.

    Raises:
        OSError: the file cannot be written.
    """
    lines = [f"{json.dumps(name)}: {json.dumps(asdict(stored))}" for name, stored in index.items()]
    write_file(folder / INDEX, ("{\n" + ",\n".join(lines) + "\n}\n").encode())


def read_index(folder: Path) -> Index:
    """Read and check the index of a checkpoint.

    Raises:
        UserError: the index is missing or damaged, or an older version wrote the checkpoint.
    """
    refuse_older(folder)
    try:
        entries: Mapping[str, dict] = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        index = {
            name: StoredTensor(**{**e, "chunks": [Chunk(**c) for c in e["chunks"]]}) for name, e in entries.items()
        }
        for name, stored in index.items():
            key_of(name)
            stored.check()
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise unreadable(folder, f"{INDEX}: {error}") from error
    return index


def metadata_of(index: Index) -> Metadata:
    """Return the metadata of all tensors for PyTorch's planners."""
    return Metadata({name: stored.metadata() for name, stored in index.items()})
