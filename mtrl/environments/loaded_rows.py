"""Checks of what the `load` of a task returns: splits of rows in the form of `mtrl.types.Row`."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Mapping
from typing import Any

from mtrl.datasets import Splits
from mtrl.errors import UserError
from mtrl.types import ROLES
from mtrl.utils.prompt_column import are_messages

SPLITS = ("train", "test", "validation")


def checked_splits(found: Any, family: str) -> Splits:
    """Return what the loader of a family returned, if it is splits of rows. A row may have an empty prompt, if `reset`
    returns the opening.

    Raises:
        UserError: it is something else, or a row lacks `id`, `prompt` or `ground_truth`, or has another kind of them,
            or two rows of a split have one id, by which results of evaluations are matched to rows.
    """
    if inspect.iscoroutine(found):
        found.close()
        raise UserError(f"load of {family} is async, and rows are loaded without an event loop; write def load")
    if not isinstance(found, Splits):
        raise UserError(
            f"load of {family} returned a {type(found).__name__}; return Splits(train=rows, test=other_rows)"
        )
    for split in SPLITS:
        rows = getattr(found, split)
        if not isinstance(rows, list | tuple):
            raise UserError(f"load of {family} returned {split} as a {type(rows).__name__}; make it a list of rows")
        for number, row in enumerate(rows):
            if (problem := _problem(row)) is not None:
                raise UserError(f"load of {family} returned row {number} of {split} {problem}")
        counts = Counter(str(row["id"]) for row in rows)
        if counts and (most := counts.most_common(1)[0])[1] > 1:
            raise UserError(
                f"load of {family} returned {most[1]} rows of {split} with id={_short(most[0])}; give each row an "
                "id of its own"
            )
    return found


def _problem(row: Any) -> str | None:
    """Return what is wrong with a row and the fix, None for a row that is right."""
    if not isinstance(row, dict):
        return f"as a {type(row).__name__}; make it a dict with id, prompt and ground_truth"
    for key in ("id", "prompt", "ground_truth"):
        if key not in row:
            return f"without {key}, and with {', '.join(map(str, row)) or 'no key'}; add it"
    row_id, prompt, truth = row["id"], row["prompt"], row["ground_truth"]
    if not isinstance(row_id, str | int):
        return f"with id={_short(row_id)}; write a text that no other row has"
    if not isinstance(prompt, list) or (prompt and not are_messages(prompt)):
        return f"with prompt={_short(prompt)}; write a list of messages with role and content"
    if strange := [message["role"] for message in prompt if message["role"] not in ROLES]:
        return f"with a message of role={_short(strange[0])}; write one of {', '.join(ROLES)}"
    if not isinstance(truth, Mapping):
        return f"with ground_truth={_short(truth)}; write a dict such as {{'answer': …}}"
    return None


def _short(value: Any) -> str:
    return repr(value)[:60]
