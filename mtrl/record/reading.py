"""Safe reading of the files of a run: only regular files inside its folder. A folder from another person may hold links
to files of the reader, endless pipes, and devices, which must be neither shown nor exported."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any


class Foreign(OSError):
    """A path that exists but is not a regular file of the run."""


def state_of(path: Path, run: Path, most: int) -> os.stat_result:
    """Return the state of a file of the run.

    Args:
        most: Maximum size of the file, in bytes.

    Raises:
        Foreign: The path leads out of the run, is not a regular file, or is too large; the message is a sentence.
        OSError: The file does not exist, or its state cannot be read.
    """
    found = path.stat()
    name = path.relative_to(run).as_posix()
    if not is_inside(path, run):
        raise Foreign(f"{name} leads out of the run and is not read; copy it into the run")
    if not stat.S_ISREG(found.st_mode):
        raise Foreign(f"{name} is no regular file and is not read")
    if found.st_size > most:
        raise Foreign(f"{name} is larger than {most // 2**20:,} MiB and is not read")
    return found


def read(path: Path, run: Path, most: int) -> bytes:
    """Return the bytes of a file of the run; raises as `state_of` does."""
    state_of(path, run, most)
    with path.open("rb") as file:
        return file.read(most)


def read_json(path: Path, run: Path, most: int) -> dict[str, Any]:
    """Return the JSON object in a file of the run.

    Raises:
        Foreign, OSError: As `state_of` does.
        ValueError: The file is not a JSON object; the message is a sentence.
    """
    try:
        found = json.loads(read(path, run, most))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path.name} is not JSON") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path.name} holds no {path.stem}")
    return found


def is_inside(path: Path, run: Path) -> bool:
    """Whether the path is inside the folder of the run after all links are followed."""
    return path.resolve().is_relative_to(run.resolve())
