"""Checkpoints: written beside, then renamed. A half-written one never has the name of a whole one."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

from mtrl.errors import UserError

TENSORS = ("model", "optimizer", "rng", "critic")
"""Parts of a checkpoint that are files of tensors; the last one only where there is a critic."""

NAME = re.compile(r"step_(\d+)")


@dataclass
class Checkpoint:
    """Everything that a run needs to go on: tensors by name, and small facts."""

    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    rng: dict[str, Tensor]
    state: dict[str, Any]
    """step, rows drawn, policy version, seconds, score of the last evaluation, …"""
    critic: dict[str, Tensor] = field(default_factory=dict)
    """Its weights and its optimiser; empty without a critic."""


class Checkpoints:
    """The `checkpoints/` folder of a run."""

    def __init__(self, folder: Path, keep_last: int = 2, keep_best: bool = True):
        self.folder, self.keep_last, self.keep_best = folder, keep_last, keep_best

    def save(self, checkpoint: Checkpoint) -> Path:
        """Write `step_<n>` and drop what need not be kept.

        Raises:
            UserError: it could not be written (the disk is full, say); the earlier ones are untouched.
        """
        step = checkpoint.state["step"]
        target = self.folder / f"step_{step:06d}"
        partial = self.folder / f".partial-{target.name}-{os.getpid()}"
        try:
            self._clear_partials()
            partial.mkdir(parents=True)
            for part in TENSORS if checkpoint.critic else TENSORS[:-1]:
                _write(partial / f"{part}.safetensors", safetensors.torch.save(getattr(checkpoint, part)))
            _write(partial / "state.json", json.dumps(checkpoint.state, indent=2).encode())
            shutil.rmtree(target, ignore_errors=True)
            os.replace(partial, target)
            _sync_folder(self.folder)
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            last = self.latest()
            kept = f"the last whole one is {last}; " if last else ""
            raise UserError(
                f"checkpoint {target} could not be written ({error.strerror or error}); {kept}free some space "
                "or name another run_dir, then continue with resume=latest"
            ) from error
        self._prune()
        return target

    def latest(self) -> Path | None:
        """The whole checkpoint of the highest step, if there is one."""
        return max(self.all(), key=_step, default=None)

    def best(self) -> Path | None:
        """The checkpoint of the best score; of equals the latest."""
        scored = [(score, _step(path), path) for path in self.all() if (score := _score(path)) is not None]
        return max(scored)[2] if scored else None

    def all(self) -> list[Path]:
        paths = self.folder.iterdir() if self.folder.is_dir() else ()
        return sorted((path for path in paths if NAME.fullmatch(path.name)), key=_step)

    def _prune(self) -> None:
        keep = set(self.all()[-self.keep_last :] if self.keep_last > 0 else self.all())
        if self.keep_best and (best := self.best()):
            keep.add(best)
        for path in self.all():
            if path not in keep:
                shutil.rmtree(path)

    def _clear_partials(self) -> None:
        """What killed runs left half-written."""
        for path in self.folder.glob(".partial-*"):
            shutil.rmtree(path, ignore_errors=True)


def read_checkpoint(path: Path) -> Checkpoint:
    """Load a checkpoint; no pickle is involved.

    Raises:
        UserError: a file is missing or damaged.
    """
    try:
        files = {part: path / f"{part}.safetensors" for part in TENSORS}
        if not files["critic"].exists():
            del files["critic"]
        parts = {part: safetensors.torch.load_file(file) for part, file in files.items()}
        state = json.loads((path / "state.json").read_text())
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise UserError(
            f"checkpoint {path} cannot be read ({error}); give another one: resume=PATH, or resume=latest"
        ) from error
    return Checkpoint(**parts, state=state)


def find_checkpoint(path: Path) -> Path:
    """The checkpoint that `resume=PATH` means: a checkpoint itself, or the latest of a run.

    Raises:
        UserError: there is none.
    """
    if (path / "state.json").exists():
        return path
    latest = Checkpoints(path / "checkpoints").latest()
    if latest is None:
        raise UserError(f"resume={path} is neither a checkpoint nor a run that has one")
    return latest


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _step(path: Path) -> int:
    found = NAME.fullmatch(path.name)
    assert found
    return int(found[1])


def _score(path: Path) -> float | None:
    state: Mapping[str, Any] = json.loads((path / "state.json").read_text())
    return state.get("score")
