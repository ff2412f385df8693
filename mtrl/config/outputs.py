"""Where results may be written: folders and files of this machine, and no addresses."""

from __future__ import annotations

import re
from pathlib import Path

from mtrl.errors import UserError

_ADDRESS = re.compile(r"[A-Za-z][\w+.-]+:/")
"""The beginning of an address. As a `Path` it has lost one of its slashes, and a drive is one letter."""


def is_address(path: str | Path | None) -> bool:
    """Whether a path is an address, which would become a folder named `s3:` here."""
    return path is not None and bool(_ADDRESS.match(str(path)))


def check_local(said: str, path: str | Path | None) -> None:
    """
    Args:
        said: the key or option with its value, as it was typed.

    Raises:
        UserError: the path is an address.
    """
    if is_address(path):
        raise UserError(
            f"{said} is an address, and results are written to folders of this machine; name a folder, and copy it "
            "when the command has ended"
        )


def check_file(said: str, path: str | Path) -> None:
    """
    Args:
        said: as for `check_local`.

    Raises:
        UserError: no file can be written there.
    """
    check_local(said, path)
    path = Path(path)
    if not path.parent.is_dir():
        raise UserError(f"{said} cannot be written, for {path.parent} is no folder; make it, or name another file")
    if path.is_dir():
        raise UserError(f"{said} is a folder; name a file in it")
