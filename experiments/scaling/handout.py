"""Cost of handing out a batch from rank 0 to other ranks and of receiving their answers, with torchrun and gloo.

    torchrun --standalone --nproc-per-node 4 experiments/scaling/handout.py --out FILE

The micro-batches are mtrl's own, and `RankGroup.run` sends them: an order to all ranks, a share to each rank, an answer
from each rank. The ranks compute nothing, and answer with as many log-probs as an update.
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
"""Numbers of micro-batches per rank."""


class Silent:
    """A worker that computes nothing, and answers as an update does."""

    def update(self, parts: list[list[MicroBatch]]) -> list[Tensor]:
        """Return a log-prob for every sampled token."""
        return [torch.zeros_like(batch.weights) for part in parts for batch in part]


def measure(rank_group: RankGroup, repeats: int) -> list[dict[str, Any]]:
    """Measure the leader, and return one row for each number of micro-batches per rank."""
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
    """Return a copy with its own memory, since a pickle contains an object only once."""
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
