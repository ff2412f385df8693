"""The complete checkpoints of a folder `checkpoints/`, for the trainer that writes them and for every reader."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from mtrl.record.records import number_of

CHECKPOINT = re.compile(r"step_(\d+)")
"""Pattern of the names of complete checkpoints."""
STATE = "state.json"
"""Name of the file with step, score and counters; a folder without it is incomplete."""


def complete_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints of a folder, sorted by step; none if the folder does not exist."""
    found = (path for path in folder.glob("step_*") if CHECKPOINT.fullmatch(path.name))
    return sorted((path for path in found if (path / STATE).is_file()), key=checkpoint_step)


def best_checkpoint(checkpoints: Sequence[Path]) -> Path | None:
    """Return the checkpoint with the best score of an evaluation, of equal scores the latest; None without a score."""
    scored = [(score, checkpoint_step(path), path) for path in checkpoints if (score := _score(path)) is not None]
    return max(scored)[2] if scored else None


def checkpoint_step(path: Path) -> int:
    """Return the training step of the folder of a checkpoint."""
    return int(path.name.removeprefix("step_"))


def _score(checkpoint: Path) -> float | None:
    """Return the score in a checkpoint's state; None if the state has none or is damaged, since a damaged old
    checkpoint must not end the run."""
    with suppress(OSError, ValueError, AttributeError, RecursionError):
        return number_of(json.loads((checkpoint / STATE).read_text(encoding="utf-8")).get("score"))
    return None
