"""Files of rows: JSON lines, JSON, parquet and CSV."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mtrl.errors import UserError
from mtrl.utils.arrow_rows import read_parquet
from mtrl.utils.strict_json import loads_text

SUFFIXES = (".jsonl", ".json", ".parquet", ".csv")


def read_file(path: Path) -> list[dict[str, Any]]:
    """Read all rows of one .jsonl, .json, .parquet or .csv file."""
    readers = {".jsonl": _read_jsonl, ".json": _read_json, ".parquet": read_parquet, ".csv": _read_csv}
    if path.suffix not in readers:
        raise UserError(f"data.path={path} ends in {path.suffix or 'nothing'}; it must be one of {', '.join(SUFFIXES)}")
    return readers[path.suffix](path)


def _read_jsonl(path: Path) -> list[dict[str, Any]]:
    with path.open("rb") as file:
        return list(_json_lines(path, file))


def _json_lines(path: Path, lines: Iterable[bytes]) -> Iterable[dict[str, Any]]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = loads_text(line.decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:  # malformed JSON or not UTF-8; nested too deep
            raise UserError(
                f"{path}, line {number}: not JSON in UTF-8 ({error}); write one JSON object per line"
            ) from error
        if not isinstance(row, dict):
            raise UserError(
                f"{path}, line {number}: a {type(row).__name__}, not an object; write one JSON object per line"
            )
        yield row


def _read_json(path: Path) -> list[dict[str, Any]]:
    """Read a list of objects, or one object per line, since the Hub uses the suffix .json for both."""
    content = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    if not content.lstrip().startswith(b"["):
        return list(_json_lines(path, content.splitlines()))
    try:
        rows = loads_text(content.decode())
    except (ValueError, RecursionError) as error:
        line = getattr(error, "lineno", 1)
        raise UserError(f"{path}, line {line}: not JSON in UTF-8 ({error}); write a list of objects") from error
    for index, row in enumerate(rows):
        if not isinstance(row, dict):
            raise UserError(f"{path}, element {index}: a {type(row).__name__}, not an object; write a list of objects")
    return rows


def _read_csv(path: Path) -> list[dict[str, Any]]:
    csv.field_size_limit(2**31 - 1)  # prompts exceed the default of 128 KiB
    content = path.read_bytes()
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path}, line {line}: not UTF-8 ({error}); save the file as UTF-8") from error
    lines = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        rows = [(lines.line_num, row) for row in lines if row]
    except csv.Error as error:
        raise UserError(
            f"{path}, line {lines.line_num}: not CSV ({error}); quote cells that hold quotes or line breaks"
        ) from error
    columns = rows[0][1] if rows else []
    if spaced := next((name for name in columns if name != name.strip()), None):
        raise UserError(
            f"{path}, line 1: the column {spaced!r} has spaces around its name, and so may have its cells; "
            "write the cells without spaces beside the commas"
        )
    if twice := next((name for name, count in Counter(columns).items() if count > 1), None):
        raise UserError(f"{path}, line 1: two columns are named {twice}; give each column a name of its own")
    for line, row in rows:
        if len(row) != len(columns):
            raise UserError(
                f"{path}, line {line}: {len(row)} columns, not {len(columns)} as in the first line; "
                "quote cells that hold commas"
            )
    return [dict(zip(columns, row, strict=True)) for _, row in rows[1:]]
