"""The resources that Ray reserves for a rollout worker, and the number of workers for which a cluster has room."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

UNITS = {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("KMGT", 1)
    for suffix, base in (("iB", 1024), ("B", 1000))
}
"""Bytes of each unit: KiB to TiB are powers of 1024, KB to TB powers of 1000 (IEC 80000-13)."""


@dataclass(frozen=True)
class WorkerResources:
    """What Ray reserves for one worker. It is a reservation, and not a limit: Ray starts a worker on a node whose free
    resources include all of it."""

    cpus: float = 1.0
    gpus: float = 0.0
    memory: int = 0
    """Number of bytes."""
    custom: Mapping[str, float] = field(default_factory=dict)
    """Amounts of resources that the nodes of a cluster offer under names of their own (`ray start --resources`)."""

    def options(self) -> dict[str, Any]:
        """Return the options of the worker's actor (`ray.remote(...).options`)."""
        return {
            "num_cpus": self.cpus,
            "num_gpus": self.gpus,
            "memory": self.memory or None,
            "resources": dict(self.custom),
        }

    def own_cluster(self, count: int) -> dict[str, Any]:
        """Return the arguments with which `ray.init` starts a node for `count` workers. CPUs and custom resources are
        as many as the workers need, in whole numbers, as Ray requires; GPUs and memory are those of the machine."""
        custom = {name: math.ceil(count * amount) for name, amount in self.custom.items()}
        return {"num_cpus": math.ceil(count * self.cpus), "resources": custom}

    def room(self, nodes: Iterable[Mapping[str, float]]) -> float:
        """Return the number of workers for which nodes have room; `inf` for workers that reserve nothing.

        Args:
            nodes: all resources of each node, used or not, under Ray's names.
        """
        return sum((self._room(node) for node in nodes), 0.0)

    def _room(self, node: Mapping[str, float]) -> float:
        wanted = {"CPU": self.cpus, "GPU": self.gpus, "memory": float(self.memory), **self.custom}
        rooms = (math.floor(node.get(name, 0.0) / amount + 1e-9) for name, amount in wanted.items() if amount)
        return min(rooms, default=math.inf)

    def __str__(self) -> str:
        parts = {"CPUs": self.cpus, "GPUs": self.gpus, "GiB of memory": self.memory / 2**30, **self.custom}
        return ", ".join(f"{amount:g} {name}" for name, amount in parts.items() if amount) or "nothing"


def byte_count(text: str) -> int:
    """Return the number of bytes of a size with a unit, such as 2GiB or 1.5 GB.

    Raises:
        ValueError: the text is not a size above 0 with a unit.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]i?B)", text)
    count = round(float(found[1]) * UNITS[found[2]]) if found else 0
    if not count:
        raise ValueError(f"{text} is not a size; write a number above 0 and a unit ({', '.join(UNITS)}), such as 2GiB")
    return count
