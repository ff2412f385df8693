"""The GPUs that this process may use, by CUDA_VISIBLE_DEVICES and by the machine's device files. The module imports no
torch."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from mtrl.errors import UserError

DEVICES = Path("/dev")
_ENTRY = re.compile(r"\d+|(GPU|MIG)-\S+")


def listed_gpus() -> list[str] | None:
    """Return the entries of CUDA_VISIBLE_DEVICES in order: indices, UUIDs (`GPU-…`) or names of MIG instances
    (`MIG-…`); None if it is not set. CUDA ignores the entries from the first invalid one on, such as -1."""
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return None
    entries: list[str] = []
    for entry in map(str.strip, value.split(",")):
        if not _ENTRY.fullmatch(entry):
            break
        entries.append(entry)
    return entries


def visible_gpus() -> int:
    """Return the number of NVIDIA GPUs that this process may use: the entries of CUDA_VISIBLE_DEVICES, or else the
    devices of the driver."""
    listed = listed_gpus()
    return sum(1 for _ in DEVICES.glob("nvidia[0-9]*")) if listed is None else len(listed)


def gpu_names(indices: Sequence[int]) -> list[str]:
    """Return the entries of CUDA_VISIBLE_DEVICES with which another process sees the GPUs that have these indices in
    this process. CUDA reads the variable of each process by the numbers of the machine, not by those of its parent.

    Raises:
        UserError: this process sees fewer GPUs.
    """
    listed = listed_gpus()
    if listed is None:
        return [str(index) for index in indices]
    if indices and max(indices) >= len(listed):
        raise UserError(
            f"GPU {max(indices)} is needed, and CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']} lists "
            f"{len(listed)} GPUs, with indices from 0; list more, or name smaller indices"
        )
    return [listed[index] for index in indices]


def gpu_evidence() -> str | None:
    """Return why this process should have a GPU, as a clause; None if nothing shows one, or if CUDA_VISIBLE_DEVICES
    hides all GPUs."""
    listed = listed_gpus()
    if listed is not None:
        return f"CUDA_VISIBLE_DEVICES={','.join(listed)} lists GPUs" if listed else None
    found = sorted(path for path in DEVICES.glob("nvidia*") if path.name[len("nvidia") :].isdigit())
    return f"this machine has the GPU {found[0]}" if found else None
