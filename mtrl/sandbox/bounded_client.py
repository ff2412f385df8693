"""Clients of a container program, such as `podman exec`, with limits on their time, and on the output of commands."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Sequence
from contextlib import suppress

from mtrl.sandbox.container import CommandResult

OUTPUT_BYTES = 2**20
"""Maximum output of a command, in bytes. A command with more output is stopped, because the whole output is held in
memory."""
SLACK_SECONDS = 60
"""Additional seconds for the client after the time limit of the command inside the container. On a busy machine the
client itself can need many of them."""


def run_bounded(client: Sequence[str], seconds: float, stdin: bytes | None = None) -> CommandResult:
    """Run a client whose command is killed inside the container after `seconds` seconds, and return its bounded output.

    The client and its process group are killed `SLACK_SECONDS` later, or as soon as more than `OUTPUT_BYTES` bytes are
    printed.

    Args:
        client: program and arguments; no shell reads them.
        stdin: standard input of the command; None: empty.
    """
    source = subprocess.PIPE if stdin is not None else subprocess.DEVNULL
    process = subprocess.Popen(
        client, stdin=source, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    late = threading.Timer(seconds + SLACK_SECONDS, _kill, [process])
    late.daemon = True  # the end of the program does not wait for it
    try:
        late.start()
        if process.stdin is not None and stdin is not None:
            with suppress(BrokenPipeError), process.stdin:
                process.stdin.write(stdin)
        assert process.stdout is not None
        printed = process.stdout.read(OUTPUT_BYTES + 1)
        if len(printed) > OUTPUT_BYTES:
            _kill(process)
        process.wait()
    finally:
        late.cancel()
        _kill(process)
        process.wait()
        process.stdout.close()  # type: ignore[union-attr]
    stopped = ""
    if len(printed) > OUTPUT_BYTES:
        stopped = f"it printed more than {OUTPUT_BYTES} bytes"
    elif process.returncode in (128 + signal.SIGKILL, -signal.SIGKILL):
        stopped = f"it took more than {seconds:g} s, or too much memory"
    output = printed[:OUTPUT_BYTES].decode("utf-8", "replace")
    return CommandResult(output, -1 if stopped else process.returncode, stopped)


def run_client(command: Sequence[str], seconds: float, cwd: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run a trusted program without input, and return its status and its outputs, whatever the status is.

    Args:
        seconds: time limit in seconds, after which the program is killed.
        cwd: working directory of the program; None: that of this process.

    Raises:
        OSError: the program cannot be run.
        subprocess.TimeoutExpired: it took too long.
    """
    return subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=seconds,
        cwd=cwd,
    )


def _kill(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
