"""What a command in the sandbox may take, what it gave, and how the sandbox itself fails."""

from __future__ import annotations

from dataclasses import dataclass


class SandboxError(RuntimeError):
    """The sandbox failed, not the command in it: the episode is void."""


@dataclass(frozen=True)
class ProcessLimits:
    """What one command, with all the processes it starts, may take. Sizes are in bytes."""

    seconds: float = 30.0
    """Wall time; then everything that the command started is killed."""
    cpu_seconds: int = 30
    """CPU time of each process; the kernel ends it with SIGXCPU."""
    memory_bytes: int = 2**30
    """Address space of each process, held by the kernel, and resident memory of all together, watched: 10 times a
    second, so that they may exceed it for a moment."""
    processes: int = 64
    """Processes and threads alive at once, the shell among them."""
    open_files: int = 128
    """Per process. With `processes` it bounds what buffers of pipes and sockets hold."""
    file_bytes: int = 32 * 2**20
    """Size of any one file."""
    workspace_bytes: int = 64 * 2**20
    """All that the episode's writable folders hold together: /workspace, /tmp and /dev/shm. They live in memory."""
    workspace_files: int = 4096
    """Files, folders and links in them together."""
    output_bytes: int = 64 * 2**10
    """Kept of stdout and of stderr each; the rest is read and dropped."""
    printed_bytes: int = 16 * 2**20
    """What a command may print before it is killed."""


@dataclass(frozen=True)
class ProcessResult:
    """What a command gave. The texts hold no host paths and no clock; only `seconds` differs from run to run."""

    exit_code: int
    """The command's own; 128 + n where signal n ended it; 137 where the sandbox killed it; 126 where it was not run."""
    stdout: str
    """Decoded as UTF-8; bytes that are not become U+FFFD."""
    stderr: str
    truncated: bool = False
    """There was more output than the limits keep."""
    timed_out: bool = False
    killed_by: str | None = None
    """The limit for which the sandbox killed it: 'time', 'memory' or 'output'; 'closed' if the sandbox was closed."""
    seconds: float = 0.0
    """Wall time. For people and metrics, not for the model: it does not repeat."""
