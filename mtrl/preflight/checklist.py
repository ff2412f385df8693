"""The checks in order, and their runner, which reports a check that crashes as failed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from mtrl.config.schema import Config
from mtrl.datasets import Splits
from mtrl.environments.agent import ProgramTask
from mtrl.environments.base import BaseEnvironment
from mtrl.environments.family import Family
from mtrl.environments.players import PlayerError
from mtrl.preflight.agreement import agreement
from mtrl.preflight.context import CheckContext
from mtrl.preflight.data import batch, splits, turns
from mtrl.preflight.exploits import echo, format_only, stalling, stuffing, tool_spam
from mtrl.preflight.hermetic import concurrency, hermetic, leaks, online_warning
from mtrl.preflight.optimum import local_optimum
from mtrl.preflight.prompt import prompt
from mtrl.preflight.result import CheckResult, failed, skipped
from mtrl.preflight.rewards import gold, growth, reward_range, robust, spread
from mtrl.preflight.worked_example import worked_example
from mtrl.utils.process_guard import exit_as_error
from mtrl.utils.user_code import reason

Check = Callable[[CheckContext], CheckResult]

CHECKS: dict[str, Check] = {
    "hermetic": hermetic,
    "leaks": leaks,
    "concurrency": concurrency,
    "robust": robust,
    "gold": gold,
    "range": reward_range,
    "spread": spread,
    "growth": growth,
    "agreement": agreement,
    "stalling": stalling,
    "format_only": format_only,
    "tool_spam": tool_spam,
    "stuffing": stuffing,
    "echo": echo,
    "local_optimum": local_optimum,
    "prompt": prompt,
    "worked_example": worked_example,
    "splits": splits,
    "turns": turns,
    "batch": batch,
}
"""Check by name; none of these needs a model."""

CHEAP = ("splits", "turns", "batch", "gold", "range", "agreement", "stalling", "prompt", "worked_example")
"""Names of the checks that a run executes at its start, on a few rows."""
OF_ROWS = ("splits", "turns", "batch", "prompt")
"""Names of the checks that run no episode."""
CHEAP_ROWS = 4
CHEAP_SECONDS = 1.4
"""Time limit for all cheap checks together, in seconds; checks that are not reached by then are reported as skipped."""
SLICE = 0.3
"""Time limit of each batch of scripted episodes, in seconds, so that one slow check does not starve the others."""


def run(context: CheckContext, checks: Iterable[tuple[str, Check]]) -> Iterator[CheckResult]:
    """Yield the results as the checks complete."""
    for name, check in checks:
        begun = time.perf_counter()
        try:
            by_program = context.family.environment is ProgramTask and name not in OF_ROWS
            result = (
                skipped("an agent program runs this task (generator.agent)") if by_program else _guarded(check, context)
            )
        except PlayerError as error:
            first = context.reported.setdefault(str(error), name)
            result = failed(*str(error).rsplit("; ", 1)) if first == name else skipped(f"a player failed; see {first}")
        except Exception as error:
            result = failed(
                f"the check itself failed: {reason(error)}",
                "fix what the message names; a check that cannot run shows nothing",
            )
        yield _complete(context, result).named(name, time.perf_counter() - begun)


def _guarded(check: Check, context: CheckContext) -> CheckResult:
    """Return the result of a check, during which the task's own code, such as `gold`, cannot end the process."""
    with exit_as_error():
        return check(context)


def _complete(context: CheckContext, result: CheckResult) -> CheckResult:
    """Add the number of episodes that were left out for lack of time to the evidence."""
    left_out = context.stage.tally.take()
    if not left_out:
        return result
    return replace(result, evidence=f"{result.evidence} ({left_out} episodes were left out for lack of time)")


def cheap_checks(
    config: Config, family: Family, splits: Splits, make_environment: Callable[[], BaseEnvironment]
) -> list[CheckResult]:
    """Run the part of the checklist that a run can afford at its start: a few rows, under two seconds, no exception.

    Example::

        for result in cheap_checks(config, parts.family, parts.splits, make_environment):
            if result.status in ("warn", "fail"):
                console.warning(f"preflight {result.name}: {result.evidence}; {result.fix}")
    """
    deadline = time.monotonic() + CHEAP_SECONDS
    context = CheckContext(
        config, family, splits, make_environment, CHEAP_ROWS, SLICE, deadline=deadline, baselines=CHEAP_ROWS
    )
    online = online_warning(context)
    results: list[CheckResult] = [] if online is None else [online.named("hermetic", 0.0)]
    for name in CHEAP:
        if time.monotonic() > deadline:
            results.append(skipped(f"not reached within {CHEAP_SECONDS:g} s; run mtrl preflight").named(name, 0.0))
        else:
            results += run(context, [(name, CHECKS[name])])
    return results
