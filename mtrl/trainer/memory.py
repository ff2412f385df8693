"""How much memory this process has needed."""

from __future__ import annotations

import resource
import sys

import torch


def peak_memory() -> dict[str, float]:
    """`perf/memory_bytes`: the most that the process has held; `perf/gpu_memory_bytes`: on the GPU, if there is one.

    That of the GPU is the most since the last call, so that every step tells its own.
    """
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in bytes there, in KiB elsewhere
    found = {"perf/memory_bytes": float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)}
    if torch.cuda.is_available():
        found["perf/gpu_memory_bytes"] = float(torch.cuda.max_memory_allocated())
        torch.cuda.reset_peak_memory_stats()
    return found
