"""Checkpoints: written to a temporary folder, then renamed, so that an incomplete one never has a checkpoint's name.

The folder of a checkpoint::

    step_000020/
        state.json                            step, rows drawn, score of the last evaluation, …
        rng.safetensors                       the leader's random state
        groups.jsonl                          groups that an asynchronous run had started or finished, but not trained
        tensors.json                          location of each tensor: file, offsets and sizes of its chunks
        model.safetensors, optimizer.…        with one process; names are those of the modules
        model-rank0.safetensors, …            with several processes: the tensors that each rank wrote
        SHA256SUMS                            a checksum of every other file

All ranks write into the same folder, so it must be on a shared file system. Only the leader creates it, renames it and
removes old checkpoints. `checkpoint_tensors` handles the tensors, `checkpoint_saver` writing in the background, and
`checksums` the checksums.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors

from mtrl.errors import UserError
from mtrl.record.checkpoints import CHECKPOINT, STATE, best_checkpoint, checkpoint_step, complete_checkpoints
from mtrl.record.checksums import SUMS, add_checksums, checksums, damage

if TYPE_CHECKING:
    from torch import Tensor

PARTIAL = ".partial-"
DAMAGED, ABANDONED = "damaged-", "abandoned-"
GROUPS, RNG, INDEX = "groups.jsonl", "rng.safetensors", "tensors.json"


@dataclass
class Checkpoint:
    """Contents of a checkpoint, without the tensors of models and optimisers, which every rank reads itself."""

    path: Path
    state: dict[str, Any]
    """Step, rows drawn, seconds, score of the last evaluation, …"""
    groups: list[dict[str, Any]] = field(default_factory=list)
    """Groups that were finished and not yet trained, and prompts whose episodes were in progress; empty for a
    synchronous run."""
    rng: dict[str, Tensor] = field(default_factory=dict)


class Checkpoints:
    """The `checkpoints/` folder of a run, for the leader."""

    def __init__(self, folder: Path, keep_last: int = 2, keep_best: bool = True):
        self.folder, self.keep_last, self.keep_best = folder, keep_last, keep_best
        self._mark = uuid.uuid4().hex[:8]
        """Mark in the names of partial folders that distinguishes this object's folders from those of a killed run."""

    def begin(self, step: int) -> Path:
        """Create a new folder for the tensors of `step`, and remove incomplete folders that killed runs left.

        Raises:
            UserError: the folder could not be created.
        """
        partial = self.folder / f"{PARTIAL}step_{step:06d}-{self._mark}"
        try:
            self._clear_partials()
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        except OSError as error:
            raise not_written(partial, error) from error
        return partial

    def commit(
        self,
        partial: Path,
        state: Mapping[str, Any],
        groups: Sequence[Mapping[str, Any]] = (),
        rng: Mapping[str, Tensor] | None = None,
    ) -> Path:
        """Complete a folder whose tensors all ranks have written, rename it to its final name, and remove checkpoints
        that need not be kept.

        Raises:
            UserError: the folder could not be written, for example because the disk is full; earlier checkpoints are
                unchanged.
        """
        from safetensors.torch import save

        target = self.folder / target_name(partial)
        try:
            write_file(partial / RNG, save(dict(rng or {})))
            if groups:
                write_file(partial / GROUPS, b"".join(json.dumps(group).encode() + b"\n" for group in groups))
            write_file(partial / STATE, json.dumps(state, indent=2).encode())
            add_checksums(partial, checksums(partial, [RNG, *([GROUPS] if groups else []), STATE]))
            sync_folder(partial)
            obsolete = self._set_aside(target)
            os.replace(partial, target)
            sync_folder(self.folder)
            shutil.rmtree(obsolete, ignore_errors=True)
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise not_written(partial, error) from error
        self._prune()
        return target

    def latest(self) -> Path | None:
        """Return the complete checkpoint of the highest step, or None."""
        return next(reversed(self.all()), None)

    def read_newest(self) -> tuple[Checkpoint, dict[Path, str]]:
        """Return the newest intact checkpoint, and the reason why each newer checkpoint is damaged.

        Raises:
            UserError: no checkpoint is intact.
        """
        broken: dict[Path, str] = {}
        written = (path for path in self.folder.iterdir() if CHECKPOINT.fullmatch(path.name))
        known = [path for path in written if (path / STATE).is_file() or (path / SUMS).is_file()]
        for path in sorted(known, key=checkpoint_step, reverse=True):
            try:
                return _read(path), broken
            except DamagedError as error:
                broken[path] = str(error)
        reasons = "; ".join(f"{path.name}: {reason}" for path, reason in broken.items())
        raise UserError(f"no checkpoint in {self.folder} is intact ({reasons}); start a new run with resume=none")

    def set_aside(self, path: Path) -> Path:
        """Rename a damaged checkpoint, so that it does not count as one of the checkpoints to keep. Return the new
        path."""
        return _renamed(path, DAMAGED)

    def abandon(self, after: int) -> list[Path]:
        """Rename the checkpoints of later steps than `after`, to which the run has gone back and which it makes again.
        They would count as newer than those that it writes now. Return the new paths."""
        return [_renamed(path, ABANDONED) for path in self.all() if checkpoint_step(path) > after]

    def best(self) -> Path | None:
        """Return the checkpoint with the best score, of equal scores the latest; None if no score can be read."""
        return best_checkpoint(self.all())

    def all(self) -> list[Path]:
        """Return all complete checkpoints, in the order of steps."""
        return complete_checkpoints(self.folder)

    def _prune(self) -> None:
        keep = set(self.all()[-self.keep_last :] if self.keep_last > 0 else self.all())
        if self.keep_best and (best := self.best()):
            keep.add(best)
        for path in self.all():
            if path not in keep:
                self._remove(path)

    def _remove(self, path: Path) -> None:
        shutil.rmtree(self._set_aside(path), ignore_errors=True)

    def _set_aside(self, path: Path) -> Path:
        """Give the checkpoint, if it exists, the name of a partial one and return this name, so that a kill during its
        deletion leaves no partial checkpoint under the old name."""
        obsolete = self.folder / f"{PARTIAL}{path.name}-{self._mark}-old"
        if path.exists():
            shutil.rmtree(obsolete, ignore_errors=True)
            os.replace(path, obsolete)
        return obsolete

    def _clear_partials(self) -> None:
        for path in self.folder.glob(f"{PARTIAL}*"):
            if self._mark not in path.name:
                shutil.rmtree(path, ignore_errors=True)


def _renamed(path: Path, prefix: str) -> Path:
    """Put `prefix` before the name of a checkpoint, in the place of an earlier one with this name."""
    target = path.with_name(f"{prefix}{path.name}")
    shutil.rmtree(target, ignore_errors=True)
    return path.rename(target)


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint without the tensors of models and optimisers. No file is a pickle.

    Raises:
        UserError: a file is missing or damaged, or an older version wrote the checkpoint.
    """
    try:
        return _read(path)
    except DamagedError as error:
        raise unreadable(path, str(error)) from error


class DamagedError(Exception):
    """A checkpoint has missing or damaged files; the message names one."""


def _read(path: Path) -> Checkpoint:
    from safetensors.torch import load

    if not (path / SUMS).exists():
        refuse_older(path)
    if reason := damage(path):
        raise DamagedError(reason)
    try:
        state = json.loads((path / STATE).read_text(encoding="utf-8"))
        lines = (path / GROUPS).read_text(encoding="utf-8").splitlines() if (path / GROUPS).exists() else []
        groups = [json.loads(line) for line in lines]
        rng = load((path / RNG).read_bytes())
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise DamagedError(str(error)) from error
    return Checkpoint(path, state, groups, rng)


def unreadable(path: Path, reason: str) -> UserError:
    """Return the error for a checkpoint that cannot be read, with the newest other intact checkpoint of its folder."""
    others = [other for other in reversed(Checkpoints(path.parent).all()) if other != path]
    intact = next((other for other in others if damage(other) is None), None)
    advice = f"give another one: resume={intact}" if intact else f"no other one in {path.parent} is intact"
    return UserError(f"checkpoint {path} cannot be read ({reason}); {advice}")


def find_checkpoint(path: Path) -> Path:
    """Return the checkpoint for `resume=PATH`: the path itself, or the latest checkpoint of a run.

    Raises:
        UserError: there is no checkpoint.
    """
    if (path / STATE).exists():
        return path
    latest = Checkpoints(path / "checkpoints").latest()
    if latest is None:
        raise UserError(f"resume={path} is neither a checkpoint nor a run that has one")
    return latest


def refuse_older(path: Path) -> None:
    """Check that the checkpoint is not in the format of an older version.

    Raises:
        UserError: an older version wrote it, which stored tensors in another format.
    """
    if (path / "model.safetensors").exists() and not (path / INDEX).exists():
        raise UserError(
            f"checkpoint {path} has no {INDEX}, so an older version of mtrl wrote it, which stored tensors in another "
            "format; finish the run with that version, or start a new one from its export: model=hf "
            "model.path=RUN/export"
        )


def not_written(partial: Path, reason: OSError | str) -> UserError:
    """Return the error for a checkpoint, with the partial folder `partial`, that could not be written."""
    last = Checkpoints(partial.parent).latest()
    advice = f"the last complete one is {last}; " if last else ""
    why = reason if isinstance(reason, str) else reason.strerror or reason
    return UserError(
        f"checkpoint {partial.parent / target_name(partial)} could not be written ({why}); {advice}free some space or "
        "name another run_dir, then continue with resume=latest"
    )


def target_name(partial: Path) -> str:
    """Return the final name of a partial folder: `step_000020` for `.partial-step_000020-…`."""
    return partial.name.removeprefix(PARTIAL).partition("-")[0]


def write_file(path: Path, data: bytes) -> None:
    """Write a file and flush it to the disk (fsync)."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Flush the entries of a folder to the disk (fsync)."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
