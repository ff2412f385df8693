"""Runs each measurement in a process of its own, so that measurements share no memory, threads or servers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

ENDING = 60.0
"""Seconds that a process has to end its servers after SIGINT. It is then killed, and its guardians end the servers."""


def run_apart(
    script: str, job: Any, name: str, words: Sequence[str] = (), limit: float | None = None, **variables: str
) -> Any:
    """Run `python script --one JOB words…`, and return the JSON in its last line of output. If this function is
    interrupted, the process gets SIGINT, so that it ends what it has started.

    Args:
        job: value of `--one`, which is passed as JSON.
        name: name of the measurement in the error message.
        limit: time limit in seconds.
        variables: further environment variables of the process.
    """
    environment: Mapping[str, str] = os.environ | variables
    command = [sys.executable, script, "--one", json.dumps(job), *words]
    # In a session of its own the process gets no Ctrl-C from the terminal, only the one SIGINT from below.
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True, env=environment)
    try:
        output, _ = process.communicate(timeout=limit)
    except BaseException:
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=ENDING)
        raise
    finally:
        process.kill()
        process.wait()
    if process.returncode:
        raise SystemExit(f"{name} ended with {process.returncode}; see above")
    return json.loads(output.splitlines()[-1])
