"""What it costs to hand a batch from rank 0 to other ranks, and to hear their answers: run by torchrun over gloo.

    torchrun --standalone --nproc-per-node 4 experiments/scaling/handout.py --out FILE

Micro-batches are mtrl's own, and so is the way that they take (`RankGroup.run`): an order to all, a share to each, an
answer from each. Nothing is computed on the way; each rank answers with as many log-probs as an update does.
"""

from __future__ import annotations

import argparse
import json
import pickle
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from synthetic import batches_of, make_samples
from torch import Tensor

from mtrl.distributed.rank_group import RankGroup
from mtrl.distributed.world import World
from mtrl.trainer.data.batching import MicroBatch

SHARES = (0, 1, 2, 4, 8)
"""Micro-batches of each rank."""


class Silent:
    """A worker that answers as an update does, and does nothing."""

    def update(self, parts: list[list[MicroBatch]]) -> list[Tensor]:
        """A log-prob for every sampled token."""
        return [torch.zeros_like(batch.weights) for part in parts for batch in part]


def measure(rank_group: RankGroup, repeats: int) -> list[dict[str, Any]]:
    """The leader's: one line for each size of a share."""
    batch = batches_of(make_samples(trajectories=8, turns=4, sampled=256, observed=256))[0].without_samples()
    lines = []
    for count in SHARES:
        shares = [([[clone(batch) for _ in range(count)]],) for _ in range(rank_group.world.size)]
        rank_group.run("update", shares)
        best = min((timed(rank_group, shares) for _ in range(repeats)), key=lambda line: line["wall_s"])
        size = len(pickle.dumps(shares[0]))
        lines.append({"ranks": rank_group.world.size, "batches": count, "bytes_per_rank": size, **best})
    return lines


def clone(batch: MicroBatch) -> MicroBatch:
    """With memory of its own, for a pickle writes what it meets twice only once."""
    return MicroBatch(**{k: v.clone() if isinstance(v, Tensor) else v for k, v in vars(batch).items()})


def timed(rank_group: RankGroup, shares: list[tuple]) -> dict[str, float]:
    start, cpu = time.perf_counter(), time.process_time()
    rank_group.run("update", shares)
    wall, spent = time.perf_counter() - start, time.process_time() - cpu
    start = time.perf_counter()
    for share in shares:
        pickle.dumps(share)
    return {"wall_s": wall, "leader_cpu_s": spent, "pickle_s": time.perf_counter() - start}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with closing(World.join(timeout=120)) as world:
        rank_group = RankGroup(world, Silent())
        if not world.is_leader:
            rank_group.follow()
            return
        args.out.write_text(json.dumps(measure(rank_group, args.repeats)))
        rank_group.dismiss()


if __name__ == "__main__":
    main()
