"""The cheap checks at the start of a run: logged, saved in preflight.json, and without effect on the run."""

from __future__ import annotations

import json
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from mtrl.config.schema import Config
from mtrl.environments.factory import Task
from mtrl.errors import UserError
from mtrl.preflight.checklist import CHEAP, cheap_checks
from mtrl.preflight.result import CheckResult, Status, to_json, warned, worst
from mtrl.preflight.sources import of_source, tasks_of
from mtrl.record.run_dir import RunDir
from mtrl.utils.files import replace_text

LIMIT = 1.9
"""Maximum duration of the checks, in seconds. The checks have a limit of their own, but a check that hangs ignores
it."""
AT_START = {*CHEAP, "hermetic", "at_start"}
"""Names of the results that the start of a run can have; `hermetic` is there for a task that declares itself online."""


def check_at_start(
    config: Config, task: Task, run_dir: Path, note: Callable[[str], None], warn: Callable[[str], None]
) -> None:
    """Run the cheap checks and log their findings; the global random state is restored afterwards.

    A results file that `mtrl preflight` wrote to the same path holds more checks and is not overwritten.

    Raises:
        UserError: a check failed, and `preflight.at_start=stop`.
    """
    if config.preflight.at_start == "none":
        return
    results = all_results(config, task)
    path = Path(config.preflight.json or RunDir(run_dir).preflight)
    try:
        if not holds_all(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_text(path, to_json(config.name, results))
    except OSError as error:
        warn(f"preflight.json={path} cannot be written ({error.strerror})")
    for result in results:
        if result.status in (Status.WARN, Status.FAIL):
            warn(f"preflight: {line_of(result)}")
    counts = {status: sum(result.status == status for result in results) for status in Status}
    note(f"preflight: {', '.join(f'{count} {status}' for status, count in counts.items() if count)}")
    if config.preflight.at_start == "stop" and worst(results) == Status.FAIL:
        failed = next(result for result in results if result.status == Status.FAIL)
        raise UserError(f"preflight.at_start=stop: {line_of(failed)}; preflight.at_start=warn continues anyway")


def holds_all(path: Path) -> bool:
    """Whether the file holds the results of the whole checklist."""
    try:
        checks = json.loads(path.read_text(encoding="utf-8"))["checks"]
        return bool({check["name"].rpartition(": ")[2] for check in checks} - AT_START)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def line_of(result: CheckResult) -> str:
    """Return one line with name, verdict, evidence and fix."""
    verdict = "failed" if result.status == Status.FAIL else "needs attention"
    return f"{result.name} {verdict}: {result.evidence}; {result.fix}"


def all_results(config: Config, task: Task) -> list[CheckResult]:
    """Return the results for the task, or for each source of a mixture under names such as `words: rewards`."""
    found = {name: results_in_time(*own) for name, own in tasks_of(config, task).items()}
    return [of_source(name, result) for name, results in found.items() for result in results]


def results_in_time(config: Config, task: Task) -> list[CheckResult]:
    """Return the results; if the checks crash or exceed the time limit, a single warning about it."""
    found: list[list[CheckResult]] = []

    def make() -> None:
        try:
            found.append(cheap_checks(config, task.family, task.splits, task.make_environment))
        except BaseException as error:  # no exception of a check may end the run
            first = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
            found.append([_missing(f"the checks themselves failed: {first}")])

    with restored_random_state():
        thread = threading.Thread(target=make, daemon=True, name="mtrl-preflight")
        thread.start()
        thread.join(LIMIT)
    return found[0] if found else [_missing(f"the checks did not end within {LIMIT:g} s, and the run goes on")]


def _missing(evidence: str) -> CheckResult:
    fix = "run mtrl preflight, which has more time, to find the reason"
    return warned(evidence, fix).named("at_start", LIMIT)


@contextmanager
def restored_random_state() -> Iterator[None]:
    """Restore the state of the global random generators at the end of the context."""
    import numpy as np

    states = random.getstate(), np.random.get_state()
    torch = sys.modules.get("torch")
    torch_state = torch.get_rng_state() if torch else None
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        if torch:
            torch.set_rng_state(torch_state)
