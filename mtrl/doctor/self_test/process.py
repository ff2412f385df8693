"""The processes of one case, with a time limit: a crash or a hang costs one line. This module does not import torch."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from pathlib import Path

from mtrl.doctor.checks import LAUNCH_VARIABLES
from mtrl.doctor.self_test.bench import Bench
from mtrl.doctor.self_test.case import Case
from mtrl.doctor.self_test.outcome import FIX, CaseResult
from mtrl.preflight.result import Status, failed, skipped
from mtrl.utils.signals import Interrupt

OUTCOME = "outcome.json"
SERVER_LOGS = "engine"
"""Name of the folder, in that of a case, for the output of servers."""
LINES = 40
"""Maximum number of lines of each output that a failed case keeps."""
GRACE = 10.0
"""Seconds that the other ranks have to end after one has failed."""
PAUSE = 0.05
"""Seconds between two looks at the processes."""


def run_case(case: Case, bench: Bench, seconds: float, interrupt: Interrupt) -> CaseResult:
    """Run a case in processes of its own, and return its outcome.

    Args:
        seconds: time limit, which is that of the case or the time that is left.
        interrupt: a signal ends the case like its time limit.
    """
    start = time.monotonic()
    reason = case.reason_to_skip(bench)
    outcome = CaseResult(skipped(reason)) if reason else _run(case, bench, seconds, interrupt)
    return replace(outcome, result=outcome.result.named(case.name, time.monotonic() - start))


def _run(case: Case, bench: Bench, seconds: float, interrupt: Interrupt) -> CaseResult:
    with tempfile.TemporaryDirectory(dir=bench.scratch, ignore_cleanup_errors=True) as name:
        folder = Path(name)
        log = folder / "output.log"
        processes = _start(case, replace(bench, scratch=name), log)
        try:
            problem = _wait(processes, seconds, interrupt)
        finally:
            for process in processes:
                _kill(process)
        return _outcome(folder, log, problem)


def _outcome(folder: Path, log: Path, problem: str) -> CaseResult:
    """Return the outcome that the leader wrote, or a failed one if it wrote none or if a process failed afterwards."""
    written, output = folder / OUTCOME, _tail(log)
    outcome = CaseResult.from_json(written.read_text(encoding="utf-8")) if written.exists() else None
    if outcome is None or (problem and outcome.passed):
        last = f": {output[-1]}" if output and problem.startswith("exit") else ""
        outcome = CaseResult(failed(f"{problem or 'it wrote no result'}{last}", FIX))
    if outcome.result.status != Status.FAIL:
        return outcome
    of_servers = [f"{file.name}: {line}" for file in _server_logs(folder) for line in _tail(file)]
    return replace(outcome, result=replace(outcome.result, details=output + of_servers))


def _start(case: Case, bench: Bench, log: Path) -> list[subprocess.Popen[bytes]]:
    """Start the ranks of a case as torchrun does, each in a session of its own, so that all its processes can be
    killed."""
    words = [case.function, bench.to_json(), str(Path(bench.scratch) / OUTCOME)]
    command = [sys.executable, "-m", "mtrl.doctor.self_test.child", *words]
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCH_VARIABLES}
    launch = {"WORLD_SIZE": str(case.ranks), "LOCAL_WORLD_SIZE": str(case.ranks)}
    launch |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    processes = []
    with ExitStack() as stack:
        output = stack.enter_context(log.open("ab"))
        for rank in range(case.ranks):
            ranks = launch | {"RANK": str(rank), "LOCAL_RANK": str(rank)} if case.ranks > 1 else {}
            process = subprocess.Popen(
                command,
                env=environment | ranks,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            processes.append(process)
    return processes


def _wait(processes: Sequence[subprocess.Popen[bytes]], seconds: float, interrupt: Interrupt) -> str:
    """Wait for the end of all processes. Return why the case failed, empty if all have ended with status 0."""
    end, problem = time.monotonic() + seconds, ""
    while True:
        codes = [process.poll() for process in processes]
        if not problem and (code := next((code for code in codes if code), 0)):
            problem, end = _ended(code), min(end, time.monotonic() + GRACE)
        if None not in codes:
            return problem
        if interrupt.requested:
            return f"it was stopped by {interrupt.requested}"
        if time.monotonic() > end:
            return problem or f"it did not end within {seconds:.0f} seconds"
        time.sleep(PAUSE)


def _ended(code: int) -> str:
    if code >= 0:
        return f"exit status {code}"
    with suppress(ValueError):
        return f"the process was ended by {signal.Signals(-code).name}"
    return f"the process was ended by signal {-code}"


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and all processes of its session that are still in its group."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _server_logs(folder: Path) -> list[Path]:
    return sorted(path for path in (folder / SERVER_LOGS).glob("*") if path.is_file())


def _tail(log: Path) -> list[str]:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
    return [line.rstrip() for line in lines if line.strip()][-LINES:]


def _free_port() -> int:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        return server.getsockname()[1]
