"""A measurement in a process of its own, so that none has another's memory, threads or servers."""

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
"""Seconds that a process that got a signal to stop may take to end its server; if killed, guardians do it."""


def run_apart(
    script: str, job: Any, name: str, words: Sequence[str] = (), limit: float | None = None, **variables: str
) -> Any:
    """`python script --one JOB words…`: the JSON that its last line is. Stopped, it ends what it has started.

    Args:
        job: what `--one` gets as JSON.
        name: what it is called if it fails.
        limit: seconds that it may take.
        variables: of its environment, beside ours.
    """
    environment: Mapping[str, str] = os.environ | variables
    command = [sys.executable, script, "--one", json.dumps(job), *words]
    # A session of its own: Ctrl-C is for us, and we pass it on once.
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
