"""Provenance of a result: the state of the source tree and the versions of the software."""

from __future__ import annotations

import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import mtrl

PACKAGES = ("torch", "transformers", "tokenizers", "renderers", "numpy", "hydra-core", "vllm", "sglang")
"""Names of the Python distributions whose version can change a result."""


def git_state(path: Path | None = None) -> dict[str, Any] | None:
    """Return `{"commit", "dirty"}` of the source tree that holds `path` (default: mtrl itself); None outside git or
    before the first commit.

    Untracked files do not make a tree dirty, because runs often write beside the code.
    """
    folder = path or Path(mtrl.__file__).parent

    def git(*arguments: str) -> str:
        command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain", "-uno"))}
    except (OSError, subprocess.SubprocessError):
        return None


def versions() -> dict[str, str]:
    """Return the versions of Python, mtrl and the installed packages of `PACKAGES`, by name, without importing them."""
    found = {"python": platform.python_version(), "mtrl": mtrl.__version__}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
