"""Rows as JSON: summaries of trajectories, groups and files, and the choices of the filters with their counts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean
from typing import Any

from mtrl.record.index import IndexRow, StoredFile
from mtrl.scoring.agreement import Thresholds, TrajectoryAgreement
from mtrl.view.select import by_value, claim, failed, success, truncated, verdict

MOST_TASKS = 500
GROUP_SORTS = ("newest", "reward_mean", "reward_std", "successes", "disagreements", "size")

Group = dict[str, Any]


def summary(row: IndexRow, thresholds: Thresholds) -> dict[str, Any]:
    """Return SUMMARY of `mtrl/view/http_api.py`."""
    line = row.line
    has_versions = line.oldest_version is not None
    return {
        "file": row.file.name,
        "line": row.number,
        "kind": row.file.kind,
        "step": row.file.step,
        "task": line.task_id,
        "group": line.group_id,
        "index": line.place,
        "reward": line.reward,
        "score": line.score,
        "verdict": verdict(line, thresholds),
        "success": success(line, thresholds),
        "claimed": claim(line, thresholds),
        "stop": line.stop_reason,
        "turns": line.turns,
        "tokens": line.tokens,
        "longest_turn": line.longest_turn,
        "cut_turns": line.cut_turns,
        "context": line.context,
        "versions": [line.oldest_version, line.newest_version] if has_versions else None,
        "advantage": line.advantage,
        "informative": line.informative,
        "drift": line.drift,
        "components": line.components,
        "rewards": line.rewards,
        "trainable": line.trainable,
        "failed": failed(line),
        "truncated": truncated(line),
        "seconds": line.seconds,
        "error": line.error,
        "problem": line.problem,
    }


def grouped(rows: Iterable[IndexRow]) -> list[list[IndexRow]]:
    """Group the rows by file and group, in the order in which the groups first occur."""
    groups: dict[tuple[str, str], list[IndexRow]] = {}
    for row in rows:
        groups.setdefault((row.file.name, row.line.group_id), []).append(row)
    return list(groups.values())


def spread(rows: Sequence[IndexRow]) -> float | None:
    """Return the population standard deviation of the rewards; None if there are none."""
    rewards = _rewards(rows)
    if not rewards:
        return None
    mean = fmean(rewards)
    return math.sqrt(fmean((reward - mean) ** 2 for reward in rewards))


def sort_groups(
    groups: list[list[IndexRow]], name: str, is_ascending: bool, thresholds: Thresholds
) -> list[list[IndexRow]]:
    if name == "newest":
        return by_value(groups, lambda rows: rows[0].file.step, is_ascending)
    values: dict[str, Callable[[list[IndexRow]], float | None]] = {
        "reward_mean": lambda rows: _mean(_rewards(rows)),
        "reward_std": spread,
        "successes": lambda rows: sum(success(row.line, thresholds) is True for row in rows),
        "disagreements": lambda rows: sum(_disagrees(row, thresholds) for row in rows),
        "size": len,
    }
    return by_value(groups, values[name], is_ascending)


def group_summary(rows: Sequence[IndexRow], thresholds: Thresholds) -> Group:
    """Return GROUP of `mtrl/view/http_api.py`."""
    file, first, rewards = rows[0].file, rows[0].line, _rewards(rows)
    credited = [row.line.informative for row in rows if row.line.informative is not None]
    return {
        "file": file.name,
        "kind": file.kind,
        "step": file.step,
        "group": first.group_id,
        "task": first.task_id,
        "size": len(rows),
        "reward_mean": _mean(rewards),
        "reward_std": spread(rows),
        "reward_min": min(rewards, default=None),
        "reward_max": max(rewards, default=None),
        **_outcomes(rows, thresholds),
        "tokens_mean": _mean([row.line.tokens for row in rows]),
        "turns_mean": _mean([row.line.turns for row in rows]),
        "informative": any(credited) if credited else None,
        "members": [summary(row, thresholds) for row in sorted(rows, key=lambda row: (row.line.place, row.number))],
    }


def _outcomes(rows: Sequence[IndexRow], thresholds: Thresholds) -> dict[str, int]:
    verdicts = Counter(verdict(row.line, thresholds) for row in rows)
    successes = [success(row.line, thresholds) for row in rows]
    return {
        "scored": sum(value is not None for value in successes),
        "successes": sum(value is True for value in successes),
        "lenient": verdicts[TrajectoryAgreement.LENIENT],
        "strict": verdicts[TrajectoryAgreement.STRICT],
        "failed": sum(failed(row.line) for row in rows),
    }


def file_summary(file: StoredFile, thresholds: Thresholds) -> dict[str, Any]:
    """Return one entry of `/files`."""
    rows = [IndexRow(file, number, line) for number, line in enumerate(list(file.lines))]
    read = [row for row in rows if row.line.problem is None]
    outcomes = _outcomes(read, thresholds)
    scored = outcomes["scored"]
    return {
        "file": file.name,
        "kind": file.kind,
        "step": file.step,
        "size": file.size,
        "modified": file.modified / 1e9,
        "indexed": file.indexed,
        "count": len(rows),
        "unreadable": len(rows) - len(read),
        "problem": file.problem,
        "reward_mean": _mean(_rewards(read)),
        "score_mean": _mean([row.line.score for row in read if row.line.score is not None]),
        "success_frac": outcomes["successes"] / scored if scored else None,
        "lenient": outcomes["lenient"],
        "strict": outcomes["strict"],
        "failed": outcomes["failed"],
        "truncated": sum(truncated(row.line) for row in read),
        "turns_mean": _mean([row.line.turns for row in read]),
        "tokens_mean": _mean([row.line.tokens for row in read]),
    }


def facets(rows: Sequence[IndexRow], thresholds: Thresholds) -> dict[str, Any]:
    """Return the values that the filters can choose among these rows, with their counts."""
    tasks: dict[str, list[IndexRow]] = {}
    for row in rows:
        tasks.setdefault(row.line.task_id, []).append(row)
    frequent = sorted(tasks.items(), key=lambda item: -len(item[1]))[:MOST_TASKS]
    return {
        "total": len(rows),
        "kinds": _counts(row.file.kind for row in rows),
        "steps": sorted(
            _counts(row.file.step for row in rows if row.file.step is not None), key=lambda item: item["value"]
        ),
        "stops": _counts(row.line.stop_reason for row in rows),
        "verdicts": _counts(value for row in rows if (value := verdict(row.line, thresholds)) is not None),
        "tasks": [_task(name, some, thresholds) for name, some in frequent],
        "tasks_total": len(tasks),
        "components": sorted({name for row in rows for name in row.line.components}),
    }


def _task(name: str, rows: Sequence[IndexRow], thresholds: Thresholds) -> dict[str, Any]:
    outcomes = [success(row.line, thresholds) for row in rows]
    return {
        "value": name,
        "count": len(rows),
        "reward_mean": _mean(_rewards(rows)),
        "successes": sum(value is True for value in outcomes),
        "scored": sum(value is not None for value in outcomes),
    }


def _counts(values: Iterable[Any]) -> list[dict[str, Any]]:
    return [{"value": value, "count": count} for value, count in Counter(values).most_common()]


def _disagrees(row: IndexRow, thresholds: Thresholds) -> bool:
    return verdict(row.line, thresholds) in (TrajectoryAgreement.LENIENT, TrajectoryAgreement.STRICT)


def _rewards(rows: Sequence[IndexRow]) -> list[float]:
    return [row.line.reward for row in rows if row.line.reward is not None]


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None
