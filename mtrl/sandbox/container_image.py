"""Images that a container engine builds from a folder with a Dockerfile, once per content of the folder."""

from __future__ import annotations

import hashlib
import os
import stat
import threading
from collections import defaultdict
from pathlib import Path

from mtrl.sandbox.bounded_client import run_client
from mtrl.sandbox.engine_container import CLIENT_SECONDS, call_engine, engine_path, user_limits

_locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
"""One lock per image, so that the episodes of a group build it once."""


def build_image(engine: str, folder: Path, seconds: float) -> str:
    """Return the name of the image that `folder`/Dockerfile describes; it is built if the engine does not have it.

    The name holds a hash of the folder, so a changed folder gives another image. Images remain in the store of the
    engine after the run.

    Args:
        engine: docker or podman.
        seconds: time limit of the build, in seconds.

    Raises:
        UserError: the engine is not installed.
        ContainerError: the build failed or took too long; the message ends with the last line that it printed.
    """
    program = engine_path(engine)
    name = f"localhost/mtrl-task:{content_hash(folder)[:16]}"
    with _locks[name]:
        if run_client([program, "image", "inspect", name], CLIENT_SECONDS).returncode != 0:
            what = f"{engine} cannot build the image of {folder.parent.name}/{folder.name}"
            options = user_limits() if engine == "podman" else []
            call_engine([program, "build", "-q", "-t", name, *options, str(folder)], seconds, what)
    return name


def content_hash(folder: Path) -> str:
    """Return the SHA-256 of the paths, the modes and the contents of all files of a folder, as hexadecimal digits."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        mode = stat.S_IMODE(path.lstat().st_mode)
        content = os.readlink(path).encode() if path.is_symlink() else path.read_bytes() if path.is_file() else b""
        for part in (str(path.relative_to(folder)).encode(), oct(mode).encode(), content):
            digest.update(f"{len(part)}:".encode() + part)
    return digest.hexdigest()
