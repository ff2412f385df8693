"""The scorer, independent of the reward: it reads the report of the tests with code of its own.

A replay of the episode in a second container would take as long as the episode.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

from mtrl.types import Row, StopReason, Trajectory


def score(trajectory: Trajectory, row: Row) -> float:
    """Return 1.0 if the tests left a reward of 1 or more, else 0.0."""
    return float(explain(trajectory, row) is None)


def explain(trajectory: Trajectory, row: Row) -> str | None:
    """Return the reason why the trajectory is no success; None if it is one."""
    report = _report(trajectory)
    if report is None:
        return "the episode ended before its tests ran"
    value = _value(report)
    if value is None:
        end = " ".join(str(report.get("output", "")).split())[-200:]
        return f"the tests left no reward; their exit code is {report.get('exit_code')}, and their output ends: {end}"
    return None if value >= 1 else f"the tests left the reward {value:g}"


def answered(trajectory: Trajectory, row: Row) -> bool:
    """Whether the policy ended the episode itself, after at least one call."""
    own = [message for message in trajectory.messages if message.get("role") == "assistant"]
    has_calls = any(message.get("tool_calls") or "<tool_call>" in str(message.get("content")) for message in own)
    return trajectory.stop_reason == StopReason.DONE and has_calls


def measure(trajectory: Trajectory, row: Row) -> dict[str, float]:
    """Return `tests`, the reward of the tests, limited to [0, 1]."""
    value = _value(_report(trajectory) or {})
    return {"tests": 0.0 if value is None else min(1.0, max(0.0, value))}


def _report(trajectory: Trajectory) -> dict[str, Any] | None:
    message = trajectory.final_observation[-1] if trajectory.final_observation else {}
    if message.get("role") != "user":
        return None
    try:
        found = json.loads(str(message.get("content")))
    except ValueError:
        return None
    return found if isinstance(found, dict) and "exit_code" in found else None


def _value(report: dict[str, Any]) -> float | None:
    """Return the number in the reward file of a report. JSON with one entry, or an entry `reward`, counts as this
    entry."""
    text = report.get("text")
    if not isinstance(text, str):
        return None
    if report.get("file") == "reward.json" and text.lstrip().startswith("{"):
        try:
            entries = json.loads(text)
            names = ["reward"] if "reward" in entries else list(entries)
            text = json.dumps(entries[names[0]]) if len(names) == 1 else ""
        except (ValueError, RecursionError):  # the agent's processes may have written the file
            return None
    found = re.fullmatch(r"\s*([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?)\s*", text)
    value = float(found[1]) if found else math.inf
    return value if math.isfinite(value) else None
