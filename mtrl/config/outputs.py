"""Checks that results are written to folders and files of this machine, and not to addresses (`s3://...`)."""

from __future__ import annotations

import re
from pathlib import Path

from mtrl.errors import UserError

_ADDRESS = re.compile(r"[A-Za-z][\w+.-]+:/")
"""Pattern of the start of an address. It needs only one slash, since `Path` removes the second, and at least two
letters, since a drive has one."""


def is_address(path: str | Path | None) -> bool:
    """Whether a path is an address, for which a local folder such as `s3:` would be created."""
    return path is not None and bool(_ADDRESS.match(str(path)))


def check_local(setting: str, path: str | Path | None) -> None:
    """Check that a path is not an address.

    Args:
        setting: the key or option with its value, as typed.

    Raises:
        UserError: the path is an address.
    """
    if is_address(path):
        raise UserError(
            f"{setting} is an address, and results are written to folders of this machine; name a folder, and copy it "
            "when the command has ended"
        )


def check_file(setting: str, path: str | Path) -> None:
    """Check that a file can be written at a path.

    Args:
        setting: as for `check_local`.

    Raises:
        UserError: the path is an address or a folder, or its parent folder does not exist.
    """
    check_local(setting, path)
    path = Path(path)
    if not path.parent.is_dir():
        raise UserError(f"{setting} cannot be written, for {path.parent} is no folder; make it, or name another file")
    if path.is_dir():
        raise UserError(f"{setting} is a folder; name a file in it")
