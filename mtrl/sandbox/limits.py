"""Limits and results of commands in the sandbox, and the error for a failure of the sandbox itself."""

from __future__ import annotations

from dataclasses import dataclass

from mtrl.errors import BackendError


class SandboxError(BackendError):
    """The sandbox failed, not the command in it; the episode is invalid."""


@dataclass(frozen=True)
class ProcessLimits:
    """Limits of one command with all its processes. Sizes are in bytes."""

    seconds: float = 30.0
    """Wall time in seconds, after which all processes of the command are killed."""
    cpu_seconds: int = 30
    """CPU time of each process in seconds, after which the kernel ends it with SIGXCPU."""
    memory_bytes: int = 2**30
    """Address space of each process, which the kernel limits, and resident memory of all processes together, which is
    checked 10 times a second, so that it may be exceeded for a moment."""
    processes: int = 64
    """Number of processes and threads alive at once, including the shell."""
    open_files: int = 128
    """Number of open files per process. Together with `processes` it limits the memory of pipe and socket buffers."""
    file_bytes: int = 32 * 2**20
    """Size of a single file."""
    workspace_bytes: int = 64 * 2**20
    """Total size of the writable folders of an episode, such as /workspace, /tmp and /dev/shm. They are in memory."""
    workspace_files: int = 4096
    """Total number of files, folders and links in the writable folders."""
    output_bytes: int = 64 * 2**10
    """Number of bytes that are stored of stdout and of stderr each; the rest is read and discarded."""
    printed_bytes: int = 16 * 2**20
    """Number of bytes that a command may print in total before it is killed."""


@dataclass(frozen=True)
class ProcessResult:
    """Result of a command. The texts contain no host paths and no times; only `seconds` differs from run to run."""

    exit_code: int
    """Exit code of the command; 128 + n if signal n ended it; 137 if the sandbox killed it; 126 if it was not run."""
    stdout: str
    """Standard output, decoded as UTF-8; invalid bytes become U+FFFD."""
    stderr: str
    truncated: bool = False
    """Whether the output was longer than the limits allow."""
    timed_out: bool = False
    killed_by: str | None = None
    """Limit for which the sandbox killed it: 'time', 'memory' or 'output'; 'closed' if the sandbox was closed."""
    seconds: float = 0.0
    """Wall time in seconds. It is for people and metrics, not for the model, because it differs between runs."""
