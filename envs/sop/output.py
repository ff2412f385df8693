"""The reward's parser of the final answer: one JSON object in the only `<final_output>` of a response."""

from __future__ import annotations

from typing import Any

from mtrl.environments.tool_calls import CLOSE as CALL_CLOSE
from mtrl.environments.tool_calls import OPEN as CALL_OPEN
from mtrl.utils.strict_json import strict_loads

OPEN, CLOSE = "<final_output>", "</final_output>"
FORBIDDEN = ("<think>", CALL_OPEN, CALL_CLOSE)


def parse_final_output(response: str) -> dict[str, Any] | None:
    """Return the object in the only `<final_output>…</final_output>` after the thinking; else None.

    Other tags, code fences and invalid JSON (a duplicate key, NaN, a trailing comma, two objects) are not accepted. A
    response that also calls a tool, or does not finish its thinking, holds no answer.
    """
    visible = response.rpartition("</think>")[2]
    if visible.count(OPEN) != 1 or visible.count(CLOSE) != 1 or any(tag in visible for tag in FORBIDDEN):
        return None
    body, closed, _ = visible.partition(OPEN)[2].partition(CLOSE)
    try:
        value = strict_loads(body) if closed else None
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def matches(fields: dict[str, Any], name: str, wanted: Any) -> bool:
    """Whether a field equals the wanted value, after `str(value).strip().lower()` on both sides. A field that is
    missing, null, a list or an object never matches."""
    value = fields.get(name)
    return isinstance(value, str | int | float) and str(value).strip().lower() == str(wanted).strip().lower()
