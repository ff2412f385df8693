"""Peak memory of this process."""

from __future__ import annotations

import resource
import sys

import torch


def peak_memory() -> dict[str, float]:
    """Return `perf/memory_bytes`, the peak memory of the process, and `perf/gpu_memory_bytes`, the peak on the GPU, if
    there is one.

    The peak on the GPU is counted from the last call, so that it is the peak of one step.
    """
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in bytes on macOS, in KiB elsewhere
    found = {"perf/memory_bytes": float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)}
    if torch.cuda.is_available():
        found["perf/gpu_memory_bytes"] = float(torch.cuda.max_memory_allocated())
        torch.cuda.reset_peak_memory_stats()
    return found
