"""The final answer as the reward reads it: one JSON object in the only `<final_output>` of a response."""

from __future__ import annotations

from typing import Any

from mtrl.environments.tool_calls import CLOSE as CALL_CLOSE
from mtrl.environments.tool_calls import OPEN as CALL_OPEN
from mtrl.strict_json import strict_loads

OPEN, CLOSE = "<final_output>", "</final_output>"
FORBIDDEN = ("<think>", CALL_OPEN, CALL_CLOSE)


def parse_final_output(response: str) -> dict[str, Any] | None:
    """The object in the only `<final_output>…</final_output>` of what follows the thinking; else None.

    No other tag counts, nor a fence, nor JSON that is only nearly JSON: a key twice, NaN, a comma too many, two
    objects. A response that also calls a tool, or does not finish thinking, holds no answer.
    """
    said = response.rpartition("</think>")[2]
    if said.count(OPEN) != 1 or said.count(CLOSE) != 1 or any(tag in said for tag in FORBIDDEN):
        return None
    body, closed, _ = said.partition(OPEN)[2].partition(CLOSE)
    try:
        value = strict_loads(body) if closed else None
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def matches(fields: dict[str, Any], name: str, wanted: Any) -> bool:
    """`str(value).strip().lower()` on both sides; a field that is missing, null, a list or an object never matches."""
    value = fields.get(name)
    return isinstance(value, str | int | float) and str(value).strip().lower() == str(wanted).strip().lower()
