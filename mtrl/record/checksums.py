"""`SHA256SUMS` of a checkpoint or a run: the SHA-256 of its files, in the format that `sha256sum -c` reads.

A disk or a copy may change a bit of a file without an error, and a changed weight is still a valid number: only the
checksum reveals the change. For a checkpoint, every rank hashes the files that it wrote and the leader collects the
lines. For a run, all files are hashed when the run ends.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mtrl.utils.files import replace_text
from mtrl.utils.process import usable_cores

SUMS = "SHA256SUMS"
READ = (".json", ".jsonl", ".safetensors")
"""Suffixes of the files that belong to a checkpoint; files with other suffixes, as file managers add, are ignored."""
MISSING = (
    f"it has no {SUMS}: an older version of mtrl wrote it, or the file was lost; to trust the files as they are, run "
    f"`sha256sum *.json* *.safetensors > {SUMS}` in it"
)


def checksum(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal digits.

    Raises:
        OSError: The file cannot be read.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def checksums(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Return the checksums of files in a folder, by name. Threads hash the files in parallel, because hashing releases
    the interpreter lock.

    Raises:
        OSError: A file cannot be read.
    """
    names = list(names)
    with ThreadPoolExecutor(min(8, usable_cores())) as threads:
        return dict(zip(names, threads.map(lambda name: checksum(folder / name), names), strict=True))


def add_checksums(folder: Path, sums: Mapping[str, str]) -> None:
    """Append the checksums of files to `SHA256SUMS` of the folder and flush them to the disk.

    Raises:
        OSError: The checksums cannot be written.
    """
    with (folder / SUMS).open("a", encoding="utf-8") as file:
        file.writelines(_lines(sums))
        file.flush()
        os.fsync(file.fileno())


def damage(folder: Path, names: Iterable[str] | None = None) -> str | None:
    """Describe the damage to the files of a checkpoint in words; None if all files are as they were written.

    Args:
        names: Names of the files to check. Default: all files of the checkpoint that exist, and all that have a
            checksum.
    """
    try:
        recorded = _recorded(folder)
        if recorded is None:
            return MISSING
        found = (path for path in folder.iterdir() if path.suffix in READ and not path.name.startswith("."))
        present = {path.name for path in found if path.is_file()}  # reading a pipe would not end
        looked_at = sorted(present | recorded.keys() if names is None else set(names))
        if lost := [name for name in looked_at if name not in present]:
            return f"{', '.join(lost)} is missing"
        if unknown := [name for name in looked_at if name not in recorded]:
            return f"{SUMS} has no checksum of {', '.join(unknown)}"
        sums = checksums(folder, looked_at)
    except (OSError, ValueError) as error:
        return str(error)
    changed = [name for name in looked_at if sums[name] != recorded[name]]
    return f"{', '.join(changed)} is not as it was written, by its checksum in {SUMS}" if changed else None


def write_checksums(folder: Path, files: Iterable[Path]) -> None:
    """Write the checksums of files in a folder or below it. They replace the earlier checksums of the folder.

    Raises:
        OSError: A file cannot be read, or the checksums cannot be written.
    """
    sums = checksums(folder, sorted(file.relative_to(folder).as_posix() for file in files))
    replace_text(folder / SUMS, "".join(_lines(sums)))


def changes(folder: Path, below: str = "") -> str | None:
    """Describe in words which files of a run have changed since the run ended. None if no file has changed, or if the
    run has no checksums because it is not over or an older version of mtrl wrote it.

    Args:
        below: Check only the files whose names, relative to the folder, begin with this prefix.
    """
    try:
        recorded = {name: digest for name, digest in (_recorded(folder) or {}).items() if name.startswith(below)}
        lost = [name for name in recorded if not (folder / name).is_file()]
        found = checksums(folder, recorded.keys() - set(lost))
    except (OSError, ValueError) as error:
        return str(error)
    changed = sorted(name for name in found if found[name] != recorded[name])
    sentences = [f"{', '.join(lost)}: missing"] if lost else []
    sentences += [f"{', '.join(changed)}: not as it was written, by its checksum in {SUMS}"] if changed else []
    return "; ".join(sentences) or None


def _lines(sums: Mapping[str, str]) -> list[str]:
    return [f"{digest}  {name}\n" for name, digest in sums.items()]


def _recorded(folder: Path) -> dict[str, str] | None:
    """Return the recorded checksums by file name; None if `SHA256SUMS` does not exist.

    Raises:
        ValueError: A line is not a checksum and a name, or the file is not a regular file.
        OSError: The file cannot be read.
    """
    path = folder / SUMS
    if path.exists() and not path.is_file():  # reading a pipe or a device would not end
        raise ValueError(f"{SUMS} is no regular file")
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ValueError(f"{SUMS} is no text") from error
    lines = text.removesuffix("\n").split("\n") if text else []  # `splitlines` would split names at U+2028
    pairs = [line.partition("  ") for line in lines]
    if bad := next((number for number, pair in enumerate(pairs, 1) if len(pair[0]) != 64 or not pair[2]), None):
        raise ValueError(f"{SUMS}, line {bad}, is not a checksum and a name")
    return {name: digest for digest, _, name in pairs}
