"""Corpora: reads passages from files."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import unquote

from mtrl.errors import UserError
from mtrl.retrieval.passage import Passage, passage_of
from mtrl.utils.files import in_home

SUFFIXES = (".jsonl", ".json", ".jsonl.gz", ".json.gz")


def load_corpus(path: str | Path) -> list[Passage]:
    """Return the passages of a file, in the file's order.

    - JSON, one object per line, or a list of objects (`.json`): rows `{id, contents}` or `{id?, title, text}`,
      see `passage_of`. The id of a row without one is its position, counted from 0.
    - JSON in the form of SQuAD and XQuAD: `data[].title` and `data[].paragraphs[].context`. The id of a paragraph is
      its position in the file; in titles, `Super_Bowl_50` becomes `Super Bowl 50`.

    Both may be compressed (`.gz`). Blank lines and a byte order mark are skipped.

    Raises:
        UserError: the file is missing, cannot be read or has no passages, a row is malformed, or an id occurs twice.
    """
    file = in_home(path)
    if not file.name.endswith(SUFFIXES):
        raise UserError(f"corpus {file} must end in one of {', '.join(SUFFIXES)}")
    try:
        with gzip.open(file, "rb") if file.suffix == ".gz" else file.open("rb") as stream:
            is_lines = file.name.removesuffix(".gz").endswith(".jsonl")
            rows = _numbered_lines(file, stream) if is_lines else _whole(file, stream.read())
            passages = _passages(file, rows)
    except (OSError, EOFError, zlib.error) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise UserError(f"corpus {file} cannot be read ({reason}); give a file of passages") from error
    if not passages:
        raise UserError(f"corpus {file} has no passages; give a file with at least one")
    return passages


def _passages(file: Path, rows: Iterable[tuple[str, Any]]) -> list[Passage]:
    places: dict[str, str] = {}
    passages: list[Passage] = []
    for place, row in rows:
        try:
            passage = passage_of(row, default_id=str(len(passages)))
        except ValueError as error:
            raise UserError(
                f"{file}, {place}: {error}; write {{id, contents}} with contents as title, line break, text, "
                "or {id, title, text}"
            ) from None
        if first := places.get(passage.id):
            raise UserError(f"{file}, {place}: id {passage.id!r} occurs in {first} already; ids must be unique")
        places[passage.id] = place
        passages.append(passage)
    return passages


def _numbered_lines(file: Path, lines: BinaryIO | Iterable[bytes]) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(lines, start=1):
        content = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
        if content.strip():
            yield f"line {number}", _parse(file, content.strip(), number)


def _whole(file: Path, content: bytes) -> Iterable[tuple[str, Any]]:
    """Return the rows of a `.json` file: SQuAD's form, a list of rows, or one row per line."""
    content = content.removeprefix(b"\xef\xbb\xbf")
    lines = content.splitlines(keepends=True)
    try:
        first = json.loads(next((line for line in lines if line.strip()), b""))
    except (ValueError, RecursionError):
        first = None
    if isinstance(first, dict) and sum(1 for line in lines if line.strip()) > 1:
        return _numbered_lines(file, lines)
    value = _parse(file, content, 1)
    if isinstance(value, dict) and "data" in value:
        return list(_paragraphs(file, value["data"]))
    return [(f"element {index}", row) for index, row in enumerate(value if isinstance(value, list) else [value])]


def _paragraphs(file: Path, articles: Any) -> Iterator[tuple[str, Any]]:
    """Yield the rows of SQuAD's form."""
    for index, article in enumerate(articles if isinstance(articles, list) else [articles]):
        place = f"data[{index}]"
        paragraphs = article.get("paragraphs") if isinstance(article, dict) else None
        if not isinstance(paragraphs, list):
            raise UserError(f"{file}, {place}: no list of paragraphs; write the form of SQuAD or XQuAD")
        title = article.get("title", "")
        for number, paragraph in enumerate(paragraphs):
            context = paragraph.get("context") if isinstance(paragraph, dict) else None
            row = {"title": unquote(title).replace("_", " ") if isinstance(title, str) else title, "text": context}
            yield f"{place}.paragraphs[{number}]", row


def _parse(file: Path, content: bytes, line: int) -> Any:
    try:
        return json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:  # malformed or not UTF-8, or nested too deep
        line += getattr(error, "lineno", 1) - 1
        reason = getattr(error, "msg", error)
        raise UserError(f"{file}, line {line}: not JSON in UTF-8 ({reason}); write one object per line") from error
