"""Versions of PyTorch and NCCL in the environment of an interpreter.

The trainer and `scripts/` run this file with the interpreter of an engine, so it imports only the standard library, and
torch where NCCL comes from no package.
"""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import asdict, dataclass
from importlib import metadata

SECONDS = 120.0
"""Time limit for an interpreter to answer, in seconds; an import of torch from a cold disk takes a minute."""


@dataclass(frozen=True)
class Versions:
    """The versions in one environment."""

    torch: str
    """Version of PyTorch, such as 2.13.0+cu130."""
    nccl: str | None
    """Version of NCCL; None for a build of PyTorch without NCCL."""


def own_versions() -> Versions:
    """Return the versions in the environment of this process.

    Raises:
        PackageNotFoundError: PyTorch is not installed.
    """
    required = (re.match(r"nvidia-nccl-\w+", each) for each in metadata.requires("torch") or ())
    for found in filter(None, required):
        try:
            return Versions(metadata.version("torch"), metadata.version(found[0]))
        except metadata.PackageNotFoundError:
            continue
    return Versions(metadata.version("torch"), _linked_nccl())


def versions_of(python: str) -> Versions:
    """Return the versions in the environment of an interpreter.

    Raises:
        RuntimeError: the interpreter does not answer, or has no PyTorch.
    """
    try:
        done = subprocess.run(
            [python, "-I", __file__], capture_output=True, text=True, timeout=SECONDS, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RuntimeError(f"{python} does not answer ({error})") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise RuntimeError(lines[-1] if lines else f"{python} ended with status {done.returncode}")
    return Versions(**json.loads(done.stdout))


def _linked_nccl() -> str | None:
    """Return the version of the NCCL that PyTorch was linked with, for builds that come with no NCCL package."""
    try:
        import torch

        return ".".join(map(str, torch.cuda.nccl.version()[:3]))
    except (ImportError, AttributeError, RuntimeError):  # a build for CPUs has no such function
        return None


if __name__ == "__main__":
    print(json.dumps(asdict(own_versions())))
