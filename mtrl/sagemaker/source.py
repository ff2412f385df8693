"""The code that a job runs, as one archive: this tree without the output of runs, and the overrides as a file.

Overrides travel in a file because hyperparameters cannot hold them safely: SageMaker limits a hyperparameter to 2500
characters, and the SDK's driver writes them into a shell script between single quotes without escaping.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import mtrl
from mtrl.errors import UserError

ROOT = Path(mtrl.__file__).parent.parent
ENTRY = "scripts/sagemaker_entry.py"
OVERRIDES, REQUIREMENTS = "overrides.json", "requirements-job.txt"
TREE = ("mtrl", "envs", "conf", ENTRY, "setup.py", "pyproject.toml", "README.md", "LICENSE")
SKIPPED = ("__pycache__", "outputs", "multirun")
"""Names of folders that are left out: runs and caches. Hidden files are left out too, because they hold secrets (.env,
.netrc, .aws)."""


def pack(archive: Path, overrides: Sequence[str], install: Sequence[str], include: Sequence[str] = ()) -> None:
    """Write the archive. Its bytes depend only on its contents, not on the time.

    Raises:
        UserError: a path of `include` does not exist, is left out completely, or would overwrite a file of mtrl.
    """
    with (
        gzip.GzipFile(archive, "wb", compresslevel=6, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w") as tar,
    ):
        for name, file in sorted(_files(include).items()):
            _add(tar, name, file.read_bytes())
        _add(tar, OVERRIDES, json.dumps(list(overrides), indent=2).encode())
        _add(tar, REQUIREMENTS, "".join(f"{line}\n" for line in install).encode())


def holds(path: str, include: Sequence[str] = ()) -> bool:
    """Whether the archive has a file or a folder at the relative `path`, which is then also that in the container.

    Raises:
        UserError: see `pack`.
    """
    name = os.path.normpath(path)
    return any(file == name or file.startswith(f"{name}/") for file in _files(include))


def _files(include: Sequence[str]) -> dict[str, Path]:
    if not (ROOT / ENTRY).is_file():
        raise UserError(f"{ENTRY} is not beside mtrl; start jobs from a clone of the repository, not from a wheel")
    found = dict(_below(ROOT, [ROOT / name for name in TREE]))
    for name in include:
        path = Path(name)
        if not name or not path.exists():
            raise UserError(
                f"sagemaker.include: {name or repr(name)} does not exist; write files or folders of this folder"
            )
        if path.resolve() == path.resolve().parent:
            raise UserError(
                f"sagemaker.include: {name} is the whole file system; write files or folders of this folder"
            )
        added = dict(_below(path.resolve().parent, [path.resolve()]))
        if not added:
            raise UserError(
                f"sagemaker.include: nothing of {name} would travel, since hidden files, links and what runs leave "
                "stay here; rename it if it holds no secrets"
            )
        if clash := sorted(added.keys() & found.keys()):
            raise UserError(f"sagemaker.include: {name} would overwrite {clash[0]} of mtrl; rename it")
        found |= added
    return found


def _below(root: Path, paths: Sequence[Path]) -> Iterator[tuple[str, Path]]:
    for path in paths:
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            name = file.relative_to(root)
            if file.is_file() and not file.is_symlink() and not any(map(_stays, name.parts)):
                yield name.as_posix(), file


def _stays(part: str) -> bool:
    return part.startswith(".") or part in SKIPPED


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(data), 0o644
    tar.addfile(entry, io.BytesIO(data))
