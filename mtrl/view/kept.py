"""What belongs to a run: regular files inside of its folder. A folder that somebody sent may hold links to files of
the reader's, pipes that never end, and devices; what is shown, and exported, is none of them."""

from __future__ import annotations

import os
import stat
from pathlib import Path


class Foreign(OSError):
    """It is there, and no file of the run."""


def state_of(path: Path, run: Path, most: int) -> os.stat_result:
    """The state of a file of the run.

    Args:
        most: bytes that it may have.

    Raises:
        Foreign: it leads out of the run, is no regular file, or is larger; the message is a sentence.
        OSError: it is not there, or cannot be looked at.
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
    """The bytes of a file of the run; see `state_of`."""
    state_of(path, run, most)
    with path.open("rb") as file:
        return file.read(most)


def is_inside(path: Path, run: Path) -> bool:
    """Whether it is in the folder of the run where all links are followed."""
    return path.resolve().is_relative_to(run.resolve())
