"""Filters and orders of the lists of trajectories."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mtrl.record.index import IndexRow
from mtrl.record.trajectories import LineSummary
from mtrl.scoring.agreement import Thresholds, TrajectoryAgreement, claimed, succeeded
from mtrl.types import FAILED, StopReason
from mtrl.view.query import Query, flag, number, whole, wrong

Test = Callable[[IndexRow], bool]

ENDED_BADLY = {*FAILED, StopReason.ABORTED}
CUT_SHORT = {StopReason.TURN_TOKEN_LIMIT, StopReason.CONTEXT_LIMIT}
DISAGREE = (TrajectoryAgreement.LENIENT, TrajectoryAgreement.STRICT)
VERDICTS = (*TrajectoryAgreement, "disagree")


def verdict(line: LineSummary, thresholds: Thresholds) -> TrajectoryAgreement | None:
    """Return whether reward and scorer agree; None if the reward or the score is missing."""
    if line.score is None or line.reward is None:
        return None
    return thresholds.verdict(line)  # type: ignore[arg-type]  # it has the reward and the score of one


def success(line: LineSummary, thresholds: Thresholds) -> bool | None:
    return None if line.score is None else succeeded(line, thresholds.success)  # type: ignore[arg-type]


def claim(line: LineSummary, thresholds: Thresholds) -> bool:
    return line.reward is not None and claimed(line, thresholds.claim)  # type: ignore[arg-type]


def failed(line: LineSummary) -> bool:
    """Whether the trajectory failed or its line cannot be read, so it is no evidence about the policy."""
    return line.stop_reason in ENDED_BADLY or line.error is not None or line.problem is not None


def truncated(line: LineSummary) -> bool:
    return line.stop_reason in CUT_SHORT or line.cut_turns > 0


def gap(line: LineSummary) -> float | None:
    return None if line.reward is None or line.score is None else abs(line.reward - line.score)


def _flag(name: str, of: Callable[[LineSummary], bool | None]) -> Callable[[list[str], Thresholds], Test]:
    def make(values: list[str], _: Thresholds) -> Test:
        value = flag(name, values[-1])
        return lambda row: of(row.line) is value

    return make


def _bound(name: str, of: Callable[[LineSummary], float | None], is_low: bool) -> Any:
    def make(values: list[str], _: Thresholds) -> Test:
        limit = number(name, values[-1])

        def test(row: IndexRow) -> bool:
            value = of(row.line)
            return value is not None and (value >= limit if is_low else value <= limit)

        return test

    return make


def _one_of(of: Callable[[IndexRow], str], apart: bool = True) -> Callable[[list[str], Thresholds], Test]:
    """Return a filter for several values. With `apart`, commas separate values; ids may contain commas."""

    def make(values: list[str], _: Thresholds) -> Test:
        wanted = {word for value in values for word in (value.split(",") if apart else [value])}
        return lambda row: of(row) in wanted

    return make


def _steps(values: list[str], _: Thresholds) -> Test:
    low, dash, high = values[-1].partition("-")
    first = whole("step", low)
    last = whole("step", high) if dash else first
    return lambda row: row.file.step is not None and first <= row.file.step <= last


def _verdict(values: list[str], thresholds: Thresholds) -> Test:
    if values[-1] not in VERDICTS:
        wrong("verdict", values[-1], f"one of {', '.join(VERDICTS)}")
    wanted = DISAGREE if values[-1] == "disagree" else (TrajectoryAgreement(values[-1]),)
    return lambda row: verdict(row.line, thresholds) in wanted


def _success(values: list[str], thresholds: Thresholds) -> Test:
    wanted = flag("success", values[-1])
    return lambda row: success(row.line, thresholds) is wanted


def _contains(values: list[str], _: Thresholds) -> Test:
    wanted = values[-1].casefold()
    return lambda row: wanted in row.line.task_id.casefold()


FILTERS: dict[str, Callable[[list[str], Thresholds], Test]] = {
    "file": _one_of(lambda row: row.file.name, apart=False),
    "kind": _one_of(lambda row: row.file.kind),
    "step": _steps,
    "task": _one_of(lambda row: row.line.task_id, apart=False),
    "group": _one_of(lambda row: row.line.group_id, apart=False),
    "stop": _one_of(lambda row: row.line.stop_reason),
    "contains": _contains,
    "verdict": _verdict,
    "success": _success,
    "failed": _flag("failed", failed),
    "truncated": _flag("truncated", truncated),
    "trainable": _flag("trainable", lambda line: line.trainable),
    "readable": _flag("readable", lambda line: line.problem is None),
    "reward_min": _bound("reward_min", lambda line: line.reward, True),
    "reward_max": _bound("reward_max", lambda line: line.reward, False),
    "turns_min": _bound("turns_min", lambda line: line.turns, True),
    "turns_max": _bound("turns_max", lambda line: line.turns, False),
}
"""Maker of the test for each parameter of a request."""

SORTS: dict[str, Callable[[LineSummary], float | None]] = {
    "reward": lambda line: line.reward,
    "score": lambda line: line.score,
    "turns": lambda line: line.turns,
    "tokens": lambda line: line.tokens,
    "longest_turn": lambda line: line.longest_turn,
    "drift": lambda line: line.drift,
    "advantage": lambda line: line.advantage,
    "gap": gap,
    "seconds": lambda line: line.seconds,
}
SORT_NAMES = ("newest", *SORTS)
ORDERS = ("desc", "asc")


def matching(rows: Sequence[IndexRow], query: Query, thresholds: Thresholds) -> Sequence[IndexRow]:
    """Return the rows that pass every filter of the query, in the given order."""
    tests = [make(values, thresholds) for name, make in FILTERS.items() if (values := query.all(name))]
    return [row for row in rows if all(test(row) for test in tests)] if tests else rows


def in_order(rows: Sequence[IndexRow], query: Query) -> Sequence[IndexRow]:
    """Sort the rows in the order of the query; `rows` must be sorted newest first."""
    name, is_ascending = query.choice("sort", SORT_NAMES), query.choice("order", ORDERS) == "asc"
    if name == "newest":
        return oldest_first(rows) if is_ascending else rows
    return by_value(rows, lambda row: SORTS[name](row.line), is_ascending)


def by_value(items: Sequence[Any], of: Callable[[Any], float | None], is_ascending: bool) -> list[Any]:
    """Sort items by a number. Items without a number are last, and ties stay in their order."""
    valued = [(value, item) for item in items if (value := of(item)) is not None]
    valued.sort(key=lambda pair: pair[0], reverse=not is_ascending)
    return [item for _, item in valued] + [item for item in items if of(item) is None]


def oldest_first(rows: Sequence[IndexRow]) -> list[IndexRow]:
    """Sort rows by ascending step; rows of the same step stay in their order."""
    return by_value(rows, lambda row: row.file.step, is_ascending=True)
