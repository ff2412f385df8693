"""The heap of the C library: memory that tensors in main memory have freed is returned to the system."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

GROWTH = 2**26
"""Number of bytes by which the process must have grown for another trim."""
LARGE = 2**26
"""Minimum number of parameters of a model for trims. With 3 million parameters they made a step about 4 % slower,
because it soon asks the system for the same pages again; with 135 million no difference was measured
(benchmarks/RESULTS.md)."""
STATM = Path("/proc/self/statm")


class Heap:
    """The heap of this process, used by the tensors of one model.

    glibc takes tensors of up to 32 MiB from its heap, and returns only the free memory at the end of the heap. Between
    the tensors of updates of 135 million parameters it kept 0.7 GiB of free memory. `trim` returns free pages between
    tensors too. It does nothing with another C library, or with a small model.

    Args:
        parameters: number of parameters of the model.
    """

    def __init__(self, parameters: int) -> None:
        usable = STATM.exists() and parameters >= LARGE
        self._release = getattr(ctypes.CDLL(None), "malloc_trim", None) if usable else None
        self._least = 0
        """Least resident memory that was seen since the last trim, in bytes."""

    def trim(self) -> None:
        """Return the free pages of the heap to the system, if the process has grown by `GROWTH` since the call at which
        it was smallest, or since the last trim."""
        if not self._release:
            return
        if (resident := resident_memory()) - self._least >= GROWTH:
            self._release(0)
            self._least = resident_memory()
        else:
            self._least = min(self._least, resident)


def resident_memory() -> int:
    """Return the bytes of this process in main memory, from Linux's /proc/self/statm."""
    return int(STATM.read_text().split()[1]) * mmap.PAGESIZE
