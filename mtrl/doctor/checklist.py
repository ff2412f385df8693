"""All lines of the doctor in their order, each within a time limit."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from queue import Empty, Queue

from mtrl.doctor import checks
from mtrl.preflight.result import Result, failed, warned

Check = Callable[[], Result]

LIMIT = 90.0
"""Seconds that a check may take: a dead network drive answers never."""
ESSENTIAL = ("python", "packages", "torch", "disk", "smoke run")
"""Without what these look at the default experiment does not run."""
CHECKS: dict[str, Check] = {
    "python": checks.python,
    "packages": checks.packages,
    "torch": checks.torch,
    "devices": checks.devices,
    "machine": checks.host,
    "disk": checks.disk,
    "extras": checks.extras,
    "vllm": checks.engine("vllm"),
    "sglang": checks.engine("sglang"),
    "sandbox": checks.sandbox,
    "ports": checks.ports,
    "git": checks.git,
    "aws": checks.aws,
}


def run(chosen: dict[str, Check], seconds: float = LIMIT) -> Iterator[Result]:
    """Each line as it comes. A check that hangs or breaks is told as one that failed, and left behind."""
    for name, check in chosen.items():
        start = time.monotonic()
        yield _within(name, check, seconds).named(name, time.monotonic() - start)


def _within(name: str, check: Check, seconds: float) -> Result:
    answers: Queue[Result] = Queue()
    bad = failed if name in ESSENTIAL else warned

    def ask() -> None:
        try:
            answers.put(check())
        except Exception as error:
            said = next(iter(str(error).splitlines()), "")
            fix = "mend what the message names, or report it as a bug"
            answers.put(bad(f"it could not be looked at: {type(error).__name__}: {said}", fix))

    threading.Thread(target=ask, name=f"doctor {name}", daemon=True).start()  # nobody waits for it at the end
    try:
        return answers.get(timeout=seconds)
    except Empty:
        return bad(f"it did not answer within {seconds:g} seconds", "look for a drive or a driver that hangs")
