"""All texts of the environment."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from mtrl.environments.worked_example import Line, with_example
from mtrl.sandbox.sql import SqlResult
from mtrl.types import Message, Row

SYSTEM = """You answer questions about SQLite databases by writing SQL, within a limited number of turns.
In each turn, first reason inside <think> and </think>; then do exactly one of these:
- <sql>query</sql> runs a query. Its first rows come back inside <observation> and </observation>.
- <solution>query</solution> submits the final query and ends the task. Its result must be the \
answer: just the columns asked for, without duplicates that were not asked for, in the order asked for.
Only SELECT queries run. select name, sql from sqlite_master lists the tables."""
EXAMPLE: list[Line] = [
    ("User", "Question: Which singers are older than 30, by name?"),
    ("Assistant", "<think>I need the tables and their columns.</think><sql>select name, sql from sqlite_master</sql>"),
    (
        "User",
        "<observation>name | sql\nsinger | CREATE TABLE singer (full_name text, country text, age integer)\n"
        "<reminder>You have 5 turns left to complete the task.</reminder></observation>",
    ),
    (
        "Assistant",
        "<think>The table singer has what I need. The names must be sorted.</think>"
        "<solution>select full_name from singer where age > 30 order by full_name</solution>",
    ),
]
EXAMPLE_ROW: Row = {
    "id": "worked example",
    "prompt": [],
    "ground_truth": {
        "sql": "select full_name from singer where age > 30 order by full_name",
        "script": "CREATE TABLE singer (full_name text, country text, age integer); insert into singer values "
        "('Rosa Lind', 'Sweden', 41), ('Tim Okoro', 'Ghana', 28), ('Ana Prado', 'Spain', 35);",
    },
}
"""The row that the example solves."""
SCHEMA_CHARACTERS = 8000
CELL_CHARACTERS = 200
_MARKUP = re.compile(r"<(?=\||/?(?:sql|solution|observation|reminder|think)>)")


@dataclass(frozen=True)
class Style:
    """Wording and layout of observations."""

    start: str
    separator: str
    """Separator between the cells of a line."""
    line: str
    """Separator between lines."""
    rows: int
    characters: int
    reminder: str
    malformed: str
    no_rows: str
    more_rows: str

    def table(self, result: SqlResult) -> str:
        """Format the column names and then the rows, as far as they fit."""
        lines = [self.separator.join(map(_cell, row)) for row in (result.columns, *result.rows)]
        if not result.rows:
            lines.append(self.no_rows)
        if result.truncated:
            lines.append(self.more_rows)
        text = self.line.join(lines)
        return text if len(text) <= self.characters else f"{text[: self.characters]}{self.line}{self.more_rows}"

    def observation(self, text: str, turns_left: int) -> str:
        """Return the observation after a turn."""
        reminder = self.reminder.format(turns=turns_left, s="" if turns_left == 1 else "s")
        return f"<observation>{self.start}{text}{self.line}{reminder}</observation>"


FULL = Style(
    start="",
    separator=" | ",
    line="\n",
    rows=50,
    characters=6000,
    reminder="<reminder>You have {turns} turn{s} left to complete the task.</reminder>",
    malformed="Your action is invalid. Reason, then write one <sql>query</sql> or one <solution>query</solution>.",
    no_rows="(no rows)",
    more_rows="(more rows are not shown)",
)
SHORT = Style(
    # With a space before every word, a name is the same token here and in the query: a tiny model can copy it.
    start=" ",
    separator=" ",
    line=" ; ",
    rows=3,
    characters=300,
    reminder="{turns} left",
    malformed="write one <sql> or one <solution>",
    no_rows="no rows",
    more_rows="more",
)
"""Style for models with contexts of a few dozen tokens."""


def style_of(row: Row | None) -> Style:
    """Return the style of a row. Generated rows are short with `environment.prompt=short`."""
    return SHORT if row and row.get("style") == "short" else FULL


def harmless(text: str) -> str:
    """Return text of a database, in which the tags of this task and control tokens (`<|…|>`) are broken."""
    return _MARKUP.sub("< ", text)


def full_prompt(question: str, schema: str = "", hint: str = "", example: bool = True) -> list[Message]:
    """Return the prompt for a language model. Prompts of `environment.prompt=short` for rows of `data.path` lack the
    worked example."""
    parts = (f"Schema:\n{schema}" if schema else "", f"Hint: {hint}" if hint else "", f"Question: {question}")
    system = with_example(SYSTEM, EXAMPLE) if example else SYSTEM
    return [{"role": "system", "content": system}, {"role": "user", "content": "\n\n".join(filter(None, parts))}]


def _cell(value: Any) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, bytes):
        return f"x'{value[: CELL_CHARACTERS // 2].hex()}'" + ("..." if len(value) > CELL_CHARACTERS // 2 else "")
    text = str(value).replace("\n", "\\n")
    return text if len(text) <= CELL_CHARACTERS else text[:CELL_CHARACTERS] + "..."
