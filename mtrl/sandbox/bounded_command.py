"""Run one command with bash, with limits on its wall time and its output, inside a container whose server has neither.

    python -I -S -c SOURCE REQUEST

REQUEST is a JSON object with the keys `command`, `cwd`, `env`, `seconds` and `bytes`. The program prints a JSON object
with the keys `output`, `exit_code` and `stopped` of `mtrl.sandbox.container.CommandResult`. Processes in the background
continue after the command. This file imports only the standard library of Python 3.10, because its text is sent to the
container.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress

PAUSE = 0.05
"""Maximum number of seconds until the end of a command is noticed."""
CANNOT_EXECUTE = 126
"""Exit code of a command that cannot be executed, as in a shell."""


def run(command: str, cwd: str, env: Mapping[str, str], seconds: float, most_bytes: int) -> dict[str, object]:
    """Run a command and return its result; a command that exceeds a limit is killed with its process group.

    Args:
        env: environment variables in addition to those of this process.
        seconds: maximum wall time in seconds.
        most_bytes: maximum number of bytes that the command may print; it is killed at the next one.

    Raises:
        OSError: the working directory is missing, or the command cannot be executed.
        ValueError: the command has a character that no argument of a program can hold, such as NUL.
    """
    process = subprocess.Popen(
        ["bash", "-c", command],
        cwd=cwd,
        env={**os.environ, **env},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    printed, is_late = _read(process, time.monotonic() + seconds, most_bytes)
    stopped = f"it took more than {seconds:g} s" if is_late else ""
    if len(printed) > most_bytes:
        stopped = f"it printed more than {most_bytes} bytes"
    if stopped:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    code = process.wait()
    text = printed[:most_bytes].decode("utf-8", "replace")
    return {"output": text, "exit_code": -1 if stopped else code if code >= 0 else 128 - code, "stopped": stopped}


def _read(process: subprocess.Popen[bytes], deadline: float, most_bytes: int) -> tuple[bytearray, bool]:
    """Return what a command has printed when it ends or exceeds a limit, and whether it exceeded that of the time. A
    process in the background may hold the pipe open after the end."""
    assert process.stdout is not None
    pipe, printed = process.stdout.fileno(), bytearray()
    while True:
        has_ended = process.poll() is not None  # before the read, which then gets all that was printed
        is_ready = bool(select.select([pipe], [], [], 0 if has_ended else PAUSE)[0])
        part = os.read(pipe, 2**16) if is_ready else b""
        printed += part
        if has_ended and not part:
            return printed, False
        if len(printed) > most_bytes:
            return printed, False
        if time.monotonic() > deadline:
            return printed, not has_ended
        if is_ready and not part:  # the command has closed its output and continues
            time.sleep(PAUSE)


def main(request: str) -> None:
    """Run the command of a request and print its result."""
    wanted = json.loads(request)
    try:
        result = run(wanted["command"], wanted["cwd"], wanted["env"], wanted["seconds"], wanted["bytes"])
    except (OSError, ValueError) as error:
        result = {"output": f"{error}\n", "exit_code": CANNOT_EXECUTE, "stopped": ""}
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1])
