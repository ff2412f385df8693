"""The rows of an experiment in the format of the managed service: parquet with a column `prompt`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from mtrl.errors import UserError, missing_extra
from mtrl.types import Row


def write_parquet(rows: Sequence[Row], path: Path) -> None:
    """Write the rows with the columns `prompt` (the text, or messages as JSON), `id` and `ground_truth` (JSON).

    The ground truth is a separate column, so that an agent can pass the prompt to its model without revealing it.

    Raises:
        UserError: pyarrow is not installed.
    """
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise missing_extra("pyarrow", "data") from None
    columns = {
        "prompt": [_text(row["prompt"]) for row in rows],
        "id": [str(row["id"]) for row in rows],
        "ground_truth": [json.dumps(row["ground_truth"], ensure_ascii=False) for row in rows],
    }
    pq.write_table(pa.table({name: pa.array(values, pa.string()) for name, values in columns.items()}), path)


def check_size(rows: int, batch: int) -> str | None:
    """Return a warning if the service would use every prompt within a few steps; None otherwise.

    Raises:
        UserError: there are fewer rows than one step takes.
    """
    if rows < batch:
        raise UserError(
            f"trainer.prompts_per_step={batch}: the managed service wants at least as many rows, and the task has "
            f"{rows}; lower it, or give more data"
        )
    return f"{rows} rows are few for {batch} a step; AWS recommends ten times as many" if rows < 10 * batch else None


def _text(prompt: object) -> str:
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and len(prompt) == 1:
        return str(prompt[0]["content"])
    return json.dumps(prompt, ensure_ascii=False)
