"""Sums of numbers over ranks."""

from __future__ import annotations

import torch


def all_sum(value: float, device: torch.device) -> float:
    """Return the sum over all ranks, on each rank; `value` itself for a single process.

    Every rank must call it. With NCCL, `device` is the rank's GPU.
    """
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return value
    total = torch.tensor(value, dtype=torch.float64, device=device)
    distributed.all_reduce(total)
    return total.item()
