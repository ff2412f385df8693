"""mtrl's checkpoint of the tensors beside those of torch.distributed.checkpoint (DCP), by two ranks on one machine.

    python benchmarks/checkpoints.py
    python benchmarks/checkpoints.py --layers 2 --width 64 --rounds 1     small, to test the program

The tensors are matrices and their two moments of Adam in float32, sharded over two gloo ranks as FSDP2 shards them. In
each round every way saves and loads them in processes of its own. "waits" is the time for which training stands still,
"done" the time until every file is written, "growth" the growth of the peak memory of rank 0, and "load" the time of
reading the values back into sharded tensors; for mtrl each rank also compares the checksums of all files, as the leader
of a run does before it resumes. Afterwards a byte of the largest file is changed in one copy, and the second largest
file is deleted in another. A fault is noticed if loading raises an error or if the loaded values are those that were
saved.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as multiprocessing
from bounds import check_sizes
from step import cpu_model
from torch import Tensor
from torch.distributed.checkpoint import (
    FileSystemReader,
    FileSystemWriter,
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from mtrl.record.checksums import damage
from mtrl.trainer.checkpoint.saver import BackgroundSaver, Saver
from mtrl.trainer.checkpoint.tensors import load_tensors

RANKS = 2
FAULTS = ("a changed byte", "a lost file")
FIGURES = ("waits", "done", "load", "growth", "size")


@dataclass(frozen=True)
class Sizes:
    """Sizes of the measured job. Each field is a command-line option."""

    layers: int = 12
    width: int = 1024
    """Each layer has four square matrices of this width."""
    rounds: int = 3


class Way:
    """A way of saving and loading named sharded tensors: mtrl's, while training waits."""

    name = "mtrl"
    pickles = False
    """Whether loading reads a pickle, which may run code."""

    def __init__(self) -> None:
        self.saver = self._make_saver()

    def _make_saver(self) -> Saver:
        return Saver(dist.new_group(backend="gloo"))

    def save(self, tensors: dict[str, Tensor], folder: Path) -> None:
        """Return as soon as training may change the tensors."""
        if dist.get_rank() == 0:
            folder.mkdir()
        dist.barrier()
        self.saver.save(tensors, folder)

    def wait(self) -> None:
        """Return when everything is written."""
        self.saver.wait()

    def load(self, into: dict[str, Tensor], folder: Path) -> None:
        if reason := damage(folder):
            raise RuntimeError(reason)
        load_tensors(into, folder)


class Background(Way):
    name = "mtrl, background"

    def _make_saver(self) -> Saver:
        return BackgroundSaver(dist.new_group(backend="gloo"))


class Dcp(Way):
    name = "DCP"
    pickles = True

    def _make_saver(self) -> Any:
        return None

    def save(self, tensors: dict[str, Tensor], folder: Path) -> None:
        dcp.save(tensors, storage_writer=FileSystemWriter(folder))

    def wait(self) -> None:
        pass

    def load(self, into: dict[str, Tensor], folder: Path) -> None:
        dcp.load(into, storage_reader=FileSystemReader(folder))


class DcpAsync(Dcp):
    name = "DCP, async"

    def save(self, tensors: dict[str, Tensor], folder: Path) -> None:
        self.future = dcp.async_save(tensors, storage_writer=FileSystemWriter(folder))

    def wait(self) -> None:
        self.future.result()  # type: ignore[union-attr]


class DcpSafetensors(Dcp):
    name = "DCP, safetensors"
    pickles = False

    def save(self, tensors: dict[str, Tensor], folder: Path) -> None:
        dcp.save(tensors, storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True))

    def load(self, into: dict[str, Tensor], folder: Path) -> None:
        dcp.load(into, storage_reader=HuggingFaceStorageReader(str(folder)))


WAYS = (Way, Background, Dcp, DcpAsync, DcpSafetensors)


def tensors_of(sizes: Sizes, make: Callable[[int, int], Tensor]) -> dict[str, Tensor]:
    """Return sharded weights and moments by name."""
    mesh = init_device_mesh("cpu", (RANKS,))
    names = [f"layers.{layer}.w{number}" for layer in range(sizes.layers) for number in range(4)]
    parts = ("model", "exp_avg", "exp_avg_sq")
    return {
        f"{part}.{name}": distribute_tensor(make(sizes.width, sizes.width), mesh, [Shard(0)])
        for part in parts
        for name in names
    }


def peak() -> int:
    """Return the peak resident memory of this process since it was reset, in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def measure(way: Way, sizes: Sizes, folder: Path) -> dict[str, Any]:
    """Save, load, and load what was damaged. All ranks call it."""
    saved = tensors_of(sizes, torch.randn)
    way.save(saved, folder / "warm-up")
    way.wait()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = peak()
    dist.barrier()
    begun = time.perf_counter()
    way.save(saved, folder / "saved")
    waits = time.perf_counter() - begun
    way.wait()
    dist.barrier()
    figures: dict[str, Any] = {"waits": waits, "done": time.perf_counter() - begun, "growth": peak() - before}
    into = tensors_of(sizes, torch.zeros)
    dist.barrier()
    begun = time.perf_counter()
    way.load(into, folder / "saved")
    figures["load"] = time.perf_counter() - begun
    assert are_equal(into, saved), f"{way.name} does not load what it saved"
    figures["size"] = sum(path.stat().st_size for path in (folder / "saved").iterdir())
    for fault, break_it in zip(FAULTS, (change_byte, lose_file), strict=True):
        copy = folder / fault
        if dist.get_rank() == 0:
            shutil.copytree(folder / "saved", copy)
            break_it(copy)
        dist.barrier()
        try:
            way.load(into := tensors_of(sizes, torch.zeros), copy)
            figures[fault] = are_equal(into, saved)
        except (Exception, CheckpointException):
            figures[fault] = True
        figures[fault] = on_all_ranks(figures[fault])
    return figures


def are_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Return whether the shards of this rank are equal."""
    return all(torch.equal(one[name].to_local(), other[name].to_local()) for name in one)  # type: ignore[attr-defined]


def on_all_ranks(value: bool) -> bool:
    """Return whether the value is true on every rank: an error, or the right values."""
    found = torch.tensor(int(value))
    dist.all_reduce(found, dist.ReduceOp.MIN)
    return bool(found)


def largest(folder: Path, count: int) -> list[Path]:
    return sorted(folder.iterdir(), key=lambda path: -path.stat().st_size)[:count]


def change_byte(folder: Path) -> None:
    (path,) = largest(folder, 1)
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        value = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([value ^ 1]))


def lose_file(folder: Path) -> None:
    largest(folder, RANKS)[-1].unlink()


def on_a_rank(rank: int, number: int, sizes: Sizes, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    figures = measure(WAYS[number](), sizes, folder)
    if rank == 0:
        (folder / "figures.json").write_text(json.dumps(figures))
    dist.destroy_process_group()


def measured(number: int, sizes: Sizes) -> dict[str, Any]:
    """Return the figures of one way."""
    with tempfile.TemporaryDirectory() as name:
        multiprocessing.start_processes(on_a_rank, (number, sizes, Path(name)), RANKS, start_method="fork")
        return json.loads((Path(name) / "figures.json").read_text())


def table(rounds: list[list[dict[str, Any]]]) -> str:
    """Return Markdown with a row per way: medians of the rounds."""
    titles = ("way", "waits, s", "done, s", "load, s", "growth, MiB", "size, MiB", *FAULTS, "reads a pickle")
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for number, way in enumerate(WAYS):
        found = [each[number] for each in rounds]
        middle = {name: median(figures[name] for figures in found) for name in FIGURES}
        times = (f"{middle[name]:.2f}" for name in ("waits", "done", "load"))
        memory = (f"{middle[name] / 2**20:,.0f}" for name in ("growth", "size"))
        faults = ("noticed" if all(figures[fault] for figures in found) else "not noticed" for fault in FAULTS)
        cells = (way.name, *times, *memory, *faults, "yes" if way.pickles else "no")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in asdict(Sizes()).items():
        parser.add_argument(f"--{name}", type=int, default=default, help="default %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all results to this file")
    args = parser.parse_args()
    check_sizes(parser, args)
    return args


def main() -> None:
    args = parse()
    sizes = Sizes(args.layers, args.width, args.rounds)
    rounds: list[list[dict[str, Any]]] = []
    for number in range(sizes.rounds):
        order = range(len(WAYS)) if number % 2 == 0 else reversed(range(len(WAYS)))
        found = {way: measured(way, sizes) for way in order}
        rounds.append([found[way] for way in range(len(WAYS))])
        print(f"round {number + 1} of {sizes.rounds}", file=sys.stderr, flush=True)
    numbers = 3 * sizes.layers * 4 * sizes.width**2
    print(
        f"{numbers / 1e6:.1f} M numbers of float32 on {RANKS} ranks; {cpu_model()}, {os.cpu_count()} cores, load "
        f"average {os.getloadavg()[0]:.1f}; torch {torch.__version__}, Python {platform.python_version()}; medians of "
        f"{sizes.rounds} rounds\n\n{table(rounds)}"
    )
    if args.json is not None:
        args.json.write_text(json.dumps({"sizes": asdict(sizes), "rounds": rounds}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
