"""`tensors.json` of a checkpoint: where each tensor is, in which chunks."""

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

from mtrl.trainer.checkpoint import INDEX, refuse_older, unreadable, write_file


@dataclass
class Chunk:
    """A part of a tensor, in one file."""

    file: str
    offsets: list[int]
    """Where it begins within the whole tensor."""
    sizes: list[int]

    def lies_in(self, shape: Sequence[int]) -> bool:
        """Whether it is a part of a tensor of this shape."""
        if not (_are_counts(self.offsets) and _are_counts(self.sizes)):
            return False
        if not len(self.offsets) == len(self.sizes) == len(shape):
            return False
        return all(start + size <= whole for start, size, whole in zip(self.offsets, self.sizes, shape, strict=True))

    def overlaps(self, other: Chunk) -> bool:
        """Whether both are of the same cells."""
        spans = zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        return all(start < place + room and place < start + size for start, size, place, room in spans)


@dataclass
class Stored:
    """A tensor of a checkpoint."""

    dtype: str
    """As PyTorch names it, `float32`."""
    shape: list[int]
    chunks: list[Chunk] = field(default_factory=list)

    def metadata(self) -> TensorStorageMetadata:
        """As PyTorch's planners read it."""
        chunks = [ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in self.chunks]
        properties = TensorProperties(dtype=getattr(torch, self.dtype))
        return TensorStorageMetadata(properties, torch.Size(self.shape), chunks)

    def check(self) -> None:
        """
        Raises:
            ValueError: it is not what a whole checkpoint says of a tensor.
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


Index = dict[str, Stored]
"""By name."""


def index_of(plans: Sequence[SavePlan]) -> Index:
    """Where the tensors of a whole plan go, which has one entry per rank."""
    index: Index = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            data, name = item.tensor_data, item.index.fqn
            assert data is not None and data.chunk is not None
            stored = index.setdefault(name, Stored(str(data.properties.dtype).removeprefix("torch."), list(data.size)))
            file = file_of(name, rank, len(plans))
            stored.chunks.append(Chunk(file, list(data.chunk.offsets), list(data.chunk.sizes)))
    return index


def file_of(name: str, rank: int, ranks: int) -> str:
    """The file that holds what `rank` of `ranks` writes of a tensor: `model.safetensors`, `model-rank3.safetensors`."""
    part = name.partition(".")[0]
    return f"{part}.safetensors" if ranks == 1 else f"{part}-rank{rank}.safetensors"


def key_of(name: str) -> str:
    """The name within its file.

    Raises:
        ValueError: the name has no part.
    """
    part, _, key = name.partition(".")
    if not (part and key):
        raise ValueError(f"{name!r} is not the name of a tensor of a checkpoint, PART.NAME")
    return key


def write_index(index: Index, folder: Path) -> None:
    """One line per tensor.

    Raises:
        OSError: it cannot be written.
    """
    lines = [f"{json.dumps(name)}: {json.dumps(asdict(stored))}" for name, stored in index.items()]
    write_file(folder / INDEX, ("{\n" + ",\n".join(lines) + "\n}\n").encode())


def read_index(folder: Path) -> Index:
    """
    Raises:
        UserError: it is missing or damaged, or the checkpoint is of an older version.
    """
    refuse_older(folder)
    try:
        entries: Mapping[str, dict] = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        index = {name: Stored(**{**e, "chunks": [Chunk(**c) for c in e["chunks"]]}) for name, e in entries.items()}
        for name, stored in index.items():
            key_of(name)
            stored.check()
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise unreadable(folder, f"{INDEX}: {error}") from error
    return index


def metadata_of(index: Index) -> Metadata:
    """As PyTorch's planners read it."""
    return Metadata({name: stored.metadata() for name, stored in index.items()})
