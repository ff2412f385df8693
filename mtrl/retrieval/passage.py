"""Passages, and their conversion from and to rows."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class Passage:
    """A text of the corpus that a retriever can find."""

    id: str
    title: str
    text: str

    @property
    def contents(self) -> str:
        """Title and text in one string, in the form of indexes and retriever servers."""
        return f"{self.title}\n{self.text}"


def passage_of(row: Any, default_id: str) -> Passage:
    """Return the passage of a row: `{id, contents}` with `contents` as `title\\ntext` (the title in quotes or not: the
    form of wiki-18, https://huggingface.co/datasets/PeterJinGo/wiki-18-corpus), or `{id?, title?, text}`.

    `contents` counts only if the row has no `text`. Without a line break, `contents` is a text without a title.

    Raises:
        ValueError: the row has neither form; the message describes the error.
    """
    if not isinstance(row, dict):
        raise ValueError(f"a {type(row).__name__}, not an object")
    identifier = row.get("id", default_id)
    if isinstance(identifier, int) and not isinstance(identifier, bool):
        identifier = str(identifier)
    if "text" in row:
        title, text = "" if row.get("title") is None else row["title"], row["text"]
    elif isinstance(row.get("contents"), str):
        head, line_break, rest = row["contents"].partition("\n")
        title, text = (_unquoted(head), rest) if line_break else ("", head)
    else:
        raise ValueError("neither a text under 'text' nor one under 'contents'")
    for name, value in (("id", identifier), ("title", title), ("text", text)):
        if not isinstance(value, str):
            raise ValueError(f"{name!r} is a {type(value).__name__}, not text")
        if _LONE_SURROGATE.search(value):
            raise ValueError(f"{name!r} holds half of a surrogate pair, which is no text")
    return Passage(identifier, title, text)


def document_of(passage: Passage) -> dict[str, str]:
    """Return the row for the answer of a retriever server; `passage_of` reads it."""
    return {"id": passage.id, "title": passage.title, "text": passage.text, "contents": passage.contents}


def _unquoted(title: str) -> str:
    return title[1:-1] if len(title) > 1 and title[0] == title[-1] == '"' else title
