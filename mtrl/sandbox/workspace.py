"""Access to the files of a sandbox from the host, which links made by commands cannot redirect elsewhere.

Every component of a path is opened separately, relative to the folder before it, and never through a link
(`O_NOFOLLOW`), so that no time passes between a check and a use. Links, pipes and sockets are refused, not followed.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_DEPTH = 64


class Workspace:
    """The folder behind a descriptor.

    Paths are relative to the folder, or begin with /workspace as commands see it; `..` is refused. Hostile commands may
    have made the files, so a caller must expect any OSError. No error names a path of the host.

    Args:
        folder: descriptor of the folder; the caller closes it.
        owner: user and group id of the written files; None: those of this process.
        most_bytes: maximum size of a file that is read, and of all files of one snapshot together.
    """

    def __init__(self, folder: int, owner: int | None, most_bytes: int):
        self._folder, self._owner, self._most = folder, owner, most_bytes

    def write(self, path: str, content: str | bytes, mode: int = 0o644) -> None:
        """Create a file, and the folders above it. An existing file or link of this name is replaced, not written to.

        Raises:
            OSError: a file or a link has the name of a folder on the path, or the workspace is full.
        """
        parts = _parts(path)
        with self._open_folder(parts[:-1], path, make=True) as folder:
            with suppress(FileNotFoundError):
                os.unlink(parts[-1], dir_fd=folder)
            file = os.open(parts[-1], os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode, dir_fd=folder)
            with open(file, "wb") as stream:
                stream.write(content.encode() if isinstance(content, str) else content)
                os.fchmod(file, mode)
                self._give_away(file)

    def read(self, path: str) -> bytes:
        """Return the content of a regular file.

        Raises:
            OSError: the file does not exist, is a link (ELOOP) or no regular file (EINVAL), or is too large (EFBIG).
        """
        parts = _parts(path)
        with self._open_folder(parts[:-1], path) as folder:
            return _read_regular(parts[-1], folder, self._most)

    def copy_in(self, source: Path, path: str = ".") -> None:
        """Copy a trusted file or folder of the host to `path`. Links are copied as links; modes are preserved.

        Raises:
            OSError: `source` is missing or holds other kinds of files, or the workspace is full.
        """
        if not source.is_dir():
            return self.write(path, source.read_bytes(), stat.S_IMODE(source.stat().st_mode))
        for entry in sorted(source.iterdir()):
            inside = str(PurePosixPath(path) / entry.name)
            if entry.is_symlink():
                parts = _parts(inside)
                with self._open_folder(parts[:-1], inside, make=True) as folder:
                    os.symlink(os.readlink(entry), parts[-1], dir_fd=folder)
            else:
                with self._open_folder(_parts(inside) if entry.is_dir() else [], inside, make=True):
                    self.copy_in(entry, inside)

    def snapshot(self) -> dict[str, bytes | None]:
        """Return all files, sorted by path: their content, or None for links, pipes, sockets and unreadable files.

        Raises:
            OSError: the files hold more than `most_bytes` (EFBIG), or folders are nested too deep (ELOOP).
        """
        found: dict[str, bytes | None] = {}
        todo: list[list[str]] = [[]]
        left = self._most
        while todo:
            parts = todo.pop()
            with self._open_folder(parts, "/".join(parts)) as folder:
                for entry in list(os.scandir(folder)):
                    path = [*parts, entry.name]
                    if entry.is_dir(follow_symlinks=False) and _enterable(entry):
                        todo.append(path)
                        continue
                    content = _read_if_regular(entry.name, folder, left)
                    left -= len(content or b"")
                    found[_text("/".join(path))] = content
        return dict(sorted(found.items()))

    @contextmanager
    def _open_folder(self, parts: list[str], path: str, make: bool = False) -> Iterator[int]:
        """Yield a descriptor of the folder at `parts`; with `make`, missing folders are created."""
        if len(parts) > _DEPTH:
            raise OSError(errno.ELOOP, f"folders are nested more than {_DEPTH} deep", path)
        folder = os.dup(self._folder)
        try:
            for part in parts:
                made = False
                if make:
                    with suppress(FileExistsError):
                        os.mkdir(part, 0o755, dir_fd=folder)
                        made = True
                below = os.open(part, _FOLDER, dir_fd=folder)
                os.close(folder)
                folder = below
                if made:
                    self._give_away(folder)
            yield folder
        finally:
            os.close(folder)

    def _give_away(self, descriptor: int) -> None:
        if self._owner is not None:
            os.fchown(descriptor, self._owner, self._owner)


def _parts(path: str) -> list[str]:
    """Split a path into its components.

    Raises:
        OSError: the path is empty, leaves the workspace, or holds characters that a path cannot have.
    """
    pure = PurePosixPath(path)
    if pure.is_absolute() and pure.parts[:2] == ("/", "workspace"):
        pure = PurePosixPath(*pure.parts[2:])
    if pure.is_absolute() or ".." in pure.parts or not pure.parts or "\0" in path or _text(path) != path:
        raise OSError(errno.EINVAL, "the path must lie in the workspace", _text(path))
    return list(pure.parts)


def _read_regular(name: str, folder: int, most: int) -> bytes:
    """Return the content of a file of at most `most` bytes. It never blocks, not even on a pipe."""
    with open(os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder), "rb") as stream:
        status = os.fstat(stream.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", _text(name))
        if not status.st_mode & stat.S_IRUSR:  # root could read it; the same files must be readable for every user
            raise PermissionError(errno.EACCES, "permission denied", _text(name))
        content = stream.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"more than {most} bytes", _text(name))
    return content


def _read_if_regular(name: str, folder: int, most: int) -> bytes | None:
    try:
        return _read_regular(name, folder, most)
    except OSError as error:
        if error.errno == errno.EFBIG:
            raise
        return None


def _enterable(entry: os.DirEntry[str]) -> bool:
    return entry.stat(follow_symlinks=False).st_mode & 0o500 == 0o500


def _text(name: str) -> str:
    """Replace the parts of a file name that are not UTF-8 by question marks; names of files are bytes."""
    return name.encode("utf-8", "replace").decode("utf-8")
