"""Rows of Arrow tables (parquet, the Hub) as JSON, in which a run saves them and agent programs get them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from datetime import date, time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtrl.errors import UserError, missing_extra

if TYPE_CHECKING:
    import pyarrow

    from mtrl.types import Row

_NOT_JSON = re.compile("timestamp|date|time|duration|interval|decimal|binary|union|extension")
"""Arrow types whose values JSON does not have, in the text of a type, which includes the types that are nested in it.
The names of nested fields are in this text too, so it may match too often, which costs time only."""


def read_parquet(path: Path) -> list[dict[str, Any]]:
    """Read all rows of a file; dates and times are text.

    Raises:
        UserError: pyarrow is not installed, or the file is not readable.
    """
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise missing_extra("pyarrow", "data") from error
    try:
        table = pyarrow.parquet.read_table(path)
        rows = table.to_pylist()
    except Exception as error:  # pyarrow's errors share no base class but Exception
        raise UserError(f"{path}: not a readable parquet file ({error}); write it again") from error
    write_times(rows, columns_to_check(table.schema))
    return rows


def is_json_file(path: Path) -> bool:
    """Return whether the columns of a readable file have types of JSON, which only those of parquet may not have."""
    if path.suffix != ".parquet":
        return True
    import pyarrow.parquet

    return not columns_to_check(pyarrow.parquet.read_schema(path))


def columns_to_check(schema: pyarrow.Schema) -> list[str]:
    """Return the names of the columns that may hold values that JSON does not have."""
    return [field.name for field in schema if _NOT_JSON.search(str(field.type))]


def write_times(rows: Iterable[dict[str, Any]], columns: Iterable[str]) -> None:
    """Replace dates and times in these columns of the rows by their ISO 8601 text, at any depth."""
    columns = list(columns)
    if columns:
        for row in rows:
            row.update((name, _with_text(row[name])) for name in columns)


def check_json(row: Row, source: str) -> None:
    """Check that all values of a row are JSON.

    Args:
        source: where the row comes from, for the error.

    Raises:
        UserError: a value is not JSON, such as bytes or a `Decimal`.
    """
    if found := next(_not_json(row, ""), None):
        name, kind = found
        raise UserError(
            f"row {row.get('id')} of {source} has {name} of type {kind}, which is not JSON; convert or drop the column"
        )


def _with_text(value: Any) -> Any:
    if isinstance(value, date | time):  # a datetime is a date
        return value.isoformat()
    if isinstance(value, dict):
        return {key: _with_text(item) for key, item in value.items()}
    return type(value)(map(_with_text, value)) if isinstance(value, list | tuple) else value


def _not_json(value: Any, name: str) -> Iterator[tuple[str, str]]:
    """Yield the name and the type of each value that is not JSON."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _not_json(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        for place, item in enumerate(value):
            yield from _not_json(item, f"{name}[{place}]")
    elif value is not None and not isinstance(value, str | int | float):
        yield name, type(value).__name__
