"""Atomic file replacement, so that a crash leaves the old file or the new one, never a partial one; strict JSON; locks;
the folder of the cache."""

from __future__ import annotations

import fcntl
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mtrl.errors import UserError


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a file beside `path`, then replace `path` by it in one move."""
    part = path.with_name(f".{path.name}.part")
    try:
        write(part)
        os.replace(part, path)
    except BaseException:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise


def replace_text(path: Path, text: str) -> None:
    """Write `text` into `path`, whole or not at all, also after a power cut."""

    def write(part: Path) -> None:
        with part.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())

    replace_file(path, write)


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Hold the lock of a file, which is made, and wait for it while another process holds it."""
    with file.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def in_home(path: str | Path) -> Path:
    """Return a path whose first part may be `~` or `~USER`, with the home folder instead; the path as it is if the
    machine has no such user."""
    return Path(os.path.expanduser(path))


def cache_folder() -> Path:
    """Return the folder of warm starts and converted models: `MTRL_CACHE`, else that of the user.

    Raises:
        UserError: neither exists, as for a user that the machine does not know.
    """
    if (named := os.environ.get("MTRL_CACHE")) is not None:
        return Path(named)
    try:
        return Path.home() / ".cache" / "mtrl"
    except RuntimeError:
        raise UserError("this user has no home folder for the cache; set MTRL_CACHE=FOLDER") from None


def plain(value: Any) -> Any:
    """Convert `value` to types that strict JSON can hold: NaN and infinities become None, numbers of other libraries
    become Python numbers."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if hasattr(value, "item"):  # numpy scalars, one-element tensors
        value = value.item()
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int) else str(value)


def to_strict_json(value: Any, indent: int | None = None) -> str:
    """Return `value` as JSON that every parser reads. Python's default would write NaN, which is not JSON."""
    return json.dumps(plain(value), ensure_ascii=False, allow_nan=False, indent=indent)
