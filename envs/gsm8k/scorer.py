"""The scorer, independent of the reward: this module shares no code with `environment.py` or `reward.py`."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation

from mtrl.types import Row, Trajectory

DIGITS = tuple("0123456789")


def score(trajectory: Trajectory, row: Row) -> float:
    """Return 1.0 if the last assistant message ends with `#### n`, gives no other answer, and n is the row's answer;
    else 0.0."""
    answer = _final_answer(_last_content(trajectory))
    return float(answer is not None and answer == _decimal(str(row["ground_truth"]["answer"]).strip()))


def answered(trajectory: Trajectory, row: Row) -> bool:
    """Whether the last assistant message gives exactly one readable answer, right or wrong."""
    return _final_answer(_last_content(trajectory)) is not None


def measure(trajectory: Trajectory, row: Row) -> dict[str, float]:
    """Return `format`: 1.0 if the last assistant message gives exactly one readable answer, right or wrong; else
    0.0."""
    return {"format": float(answered(trajectory, row))}


def _last_content(trajectory: Trajectory) -> object:
    """Return the content of the last assistant message."""
    responses = [message for message in trajectory.messages if message.get("role") == "assistant"]
    return responses[-1].get("content") if responses else None


def _final_answer(content: object) -> Decimal | None:
    """Return the number after the only `####` that a number follows, if the message ends there; else None."""
    if not isinstance(content, str):
        return None
    marked = re.findall("(#+)([^#]*)", content)
    claims = [text for marks, text in marked if marks == "####" and text.lstrip(" \t$-.")[:1] in DIGITS]
    if len(claims) != 1 or marked[-1] != ("####", claims[0]):
        return None
    return _decimal(claims[0].strip())


def _decimal(text: str) -> Decimal | None:
    """Parse a plain number, with at most a sign, a dollar sign, thousands separators and a final point; None if it is
    none."""
    sign = "-" if text.startswith(("-", "$-")) else ""
    digits = text.removeprefix("-").removeprefix("$") if text[:2] != "$-" else text[2:]
    if not set(digits) <= {*DIGITS, ",", "."}:
        return None
    whole, _, decimals = digits.partition(".")
    groups = whole.split(",")
    if len(groups) > 1 and (not 1 <= len(groups[0]) <= 3 or any(len(group) != 3 for group in groups[1:])):
        return None
    try:
        return Decimal(f"{sign}{''.join(groups) or '0'}.{decimals or '0'}") if (whole or decimals) else None
    except InvalidOperation:
        return None
