"""Lists and objects in the cells of tables whose format has only text, such as CSV: there they are JSON text."""

from __future__ import annotations

from typing import Any

from mtrl.utils.strict_json import loads_text


def from_cell(value: Any) -> Any:
    """Return the list or the object that a text holds as JSON; any other value unchanged."""
    if not isinstance(value, str) or not value.lstrip().startswith(("[", "{")):
        return value
    try:
        found = loads_text(value)
    except (ValueError, RecursionError):
        return value
    return found if isinstance(found, list | dict) else value
