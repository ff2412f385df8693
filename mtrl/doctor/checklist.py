"""All checks of the doctor in their order, each with a time limit."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from queue import Empty, Queue

from mtrl.doctor import checks
from mtrl.preflight.result import CheckResult, failed, warned

Check = Callable[[], CheckResult]

LIMIT = 90.0
"""Time limit of a check, in seconds: a dead network drive never answers."""
ESSENTIAL = ("python", "packages", "torch", "disk", "smoke run")
"""Names of the checks that the default experiment depends on; if one of them hangs or crashes, it counts as failed."""
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


def run(chosen: dict[str, Check], seconds: float = LIMIT) -> Iterator[CheckResult]:
    """Yield each result as its check completes. A check that hangs or crashes is reported as failed (or as a warning if
    it is not essential), and the next check starts."""
    for name, check in chosen.items():
        start = time.monotonic()
        yield _within(name, check, seconds).named(name, time.monotonic() - start)


def _within(name: str, check: Check, seconds: float) -> CheckResult:
    answers: Queue[CheckResult] = Queue()
    bad = failed if name in ESSENTIAL else warned

    def ask() -> None:
        try:
            answers.put(check())
        except Exception as error:
            first = next(iter(str(error).splitlines()), "")
            fix = "fix what the message names, or report it as a bug"
            answers.put(bad(f"the check failed: {type(error).__name__}: {first}", fix))

    threading.Thread(target=ask, name=f"doctor {name}", daemon=True).start()  # a hanging check must not delay exit
    try:
        return answers.get(timeout=seconds)
    except Empty:
        return bad(f"it did not answer within {seconds:g} seconds", "search for a drive or a driver that hangs")
