"""The scorer, independent of the reward: success requires that every field of the final answer equals its label in the
row. This module shares no code with `output.py`, `reward.py` or the domains."""

from __future__ import annotations

import json
import re
from typing import Any

from mtrl.types import Row, Trajectory

_TAGGED = re.compile(r"<final_output>(?P<body>.*)</final_output>", re.DOTALL)
_FORBIDDEN = re.compile(r"</?final_output>|<think>|</?tool_call>")


def score(trajectory: Trajectory, row: Row) -> float:
    """Return 1.0 if the last assistant message answers with exactly the fields of the ground truth, all of them right;
    else 0.0."""
    pairs = _answer(trajectory)
    wanted = [(name, _folded(value)) for name, value in row["ground_truth"].items()]
    return float(bool(wanted) and sorted((name, _folded(value)) for name, value in pairs) == sorted(wanted))


def answered(trajectory: Trajectory, row: Row) -> bool:
    """Whether the last assistant message holds a readable answer, right or wrong."""
    return bool(_answer(trajectory))


def measure(trajectory: Trajectory, row: Row) -> dict[str, float]:
    """Return `format`, which is 1.0 if the last message holds a readable answer, and `field/<name>`, which is 1.0 if
    this field is right; else 0.0.

    A field that occurs twice is wrong."""
    pairs = [(name, _folded(value)) for name, value in _answer(trajectory)]
    names = [name for name, _ in pairs]
    fields = {
        f"field/{name}": float(names.count(name) == 1 and (name, _folded(value)) in pairs)
        for name, value in row["ground_truth"].items()
    }
    return {"format": float(answered(trajectory, row)), **fields}


def _answer(trajectory: Trajectory) -> list[tuple[str, Any]]:
    """Return the pairs of the answer in the last assistant message; empty if it calls tools."""
    responses = [message for message in trajectory.messages if message.get("role") == "assistant"]
    if not responses or responses[-1].get("tool_calls") or not isinstance(responses[-1].get("content"), str):
        return []
    return _pairs(responses[-1]["content"].split("</think>")[-1])


def _pairs(text: str) -> list[tuple[str, Any]]:
    """Return keys and values of the object, in their order; empty if there is no object."""
    # The tags are counted first, because a search for a closing tag takes quadratic time with many opening tags.
    found = _TAGGED.search(text) if len(_FORBIDDEN.findall(text)) == 2 else None
    if found is None:
        return []
    try:
        value = json.loads(found["body"], object_pairs_hook=_Object, parse_constant=_Constant)
    except (ValueError, RecursionError):
        return []
    return list(value) if isinstance(value, _Object) and _plain(value) else []


class _Object(list):
    """The pairs of a JSON object, including pairs with the same key."""


class _Constant(str):
    """NaN or Infinity, which are not valid JSON."""


def _plain(pairs: _Object) -> bool:
    """Whether all values are text, numbers or booleans."""
    return all(type(value) in (str, int, float, bool) for _, value in pairs)


def _folded(value: Any) -> str:
    return str(value).strip().lower()
