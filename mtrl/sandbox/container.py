"""A container: the place of one episode's commands, with files of its own, in the same form for every backend."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from mtrl.errors import BackendError

LARGEST_COPY = 2**16
"""Maximum number of bytes that are read of a file."""
COPY_SECONDS = 30.0
"""Time limit for reading a file, in seconds."""


class ContainerError(BackendError):
    """The backend failed, not a command in the container; the episode is invalid."""


class ContainerRemovedError(ContainerError):
    """The container was removed because commands in it exceeded a limit; the episode is valid."""


class CopyRefusedError(ContainerError):
    """The container runs, but takes no files, because it is full or a command has made their folder unusable. After a
    command of an agent, the episode is valid."""


@dataclass(frozen=True)
class ContainerLimits:
    """Limits of a container with all its processes."""

    memory: str = "2g"
    """Memory without swap, in docker's notation, such as 512m or 4g."""
    cpus: float | None = None
    """Number of cores whose time all processes together may use; None: all cores."""
    processes: int = 256
    """Number of processes and threads alive at once."""
    disk_mb: int | None = None
    """Size of the files that the container writes, in MiB, which is looked at about once a second, and of each of its
    files, which the kernel limits; files that are removed while they are open count only if this process is root and
    the engine runs on this machine. None: no limit."""
    network: bool = False
    """Whether the container has the network of the backend; without it there is only the loopback device."""
    seconds: float = 7200.0
    """Wall time in seconds after which the container ends by itself, whatever happens to this process."""


@dataclass(frozen=True)
class CommandResult:
    """Result of a command in a container."""

    output: str
    """Standard output and standard error, interleaved, decoded as UTF-8; invalid bytes become U+FFFD."""
    exit_code: int
    """Exit code of the command; -1 if it was stopped at a limit."""
    stopped: str = ""
    """Reason why the command was stopped; empty if it ended by itself."""


class Container(Protocol):
    """A container that lives for one episode. One command runs at a time; `remove` may be called in any thread."""

    def start(self) -> None:
        """Start the container.

        Raises:
            ContainerError: the container does not start; the message names the image and the reason.
        """

    def run(self, command: str, seconds: float, env: Mapping[str, str] | None = None) -> CommandResult:
        """Run a command with bash in the working directory, for at most `seconds` seconds of wall time.

        Args:
            env: environment variables for the command, in addition to those of the container.

        Raises:
            ContainerError: the backend failed.
        """

    def copy_in(self, source: Path, target: str) -> None:
        """Copy the content of a trusted folder of the host into the existing folder `target` of the container.

        Raises:
            ContainerRemovedError: the container has exceeded a limit.
            CopyRefusedError: the container takes no files; an engine's container raises ContainerError instead, since
                the engine does not say whose fault it is.
            ContainerError: the backend failed.
        """

    def remove(self) -> None:
        """End all processes of the container and delete its files, even if its start was interrupted. A second call
        has no effect."""


def copy_out(container: Container, path: str) -> str | None:
    """Return the text of a file of a container, which is untrusted; None if the file is missing or no regular file. Of
    a larger file only the first 64 KiB are returned.

    Raises:
        ContainerError: the backend failed.
    """
    name = shlex.quote(path)
    done = container.run(f"[ -f {name} ] && head -c {LARGEST_COPY} {name}", COPY_SECONDS)
    return done.output[:LARGEST_COPY] if done.exit_code == 0 else None
