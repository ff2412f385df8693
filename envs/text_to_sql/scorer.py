"""The scorer, independent of the reward: this module shares no code with `environment.py` or `reward.py`."""

from __future__ import annotations

from contextlib import closing
from typing import Any

from mtrl.sandbox.alterations import alterations
from mtrl.sandbox.sql import QueryLimits, SqlResult, SqlSandbox
from mtrl.types import Row, Trajectory

LIMITS = QueryLimits(operations=1_000_000_000, seconds=60.0, rows=200_000, result_bytes=256_000_000)
"""Limits of the scorer, above those of any episode, so that the scorer can run every query that the reward can run."""
TAGS = ("<sql>", "</sql>", "<solution>", "</solution>")


def score(trajectory: Trajectory, row: Row) -> float:
    """Return 1.0 if the last assistant message submits one query whose result on a fresh database equals the gold
    query's; else 0.0."""
    query = _submitted(_last_content(trajectory))
    if query is None:
        return 0.0
    truth = row["ground_truth"]
    with closing(_fresh_database(truth)) as database:
        gold = database.run(truth["sql"])
        equal = _equal(database.run(query), gold, sorts_rows(truth["sql"]))
        return float(equal and not _is_constant(database, query, truth["sql"], gold))


def answered(trajectory: Trajectory, row: Row) -> bool:
    """Whether the last assistant message submits one query, right or wrong."""
    return _submitted(_last_content(trajectory)) is not None


def measure(trajectory: Trajectory, row: Row) -> dict[str, float]:
    """Return three values of 1.0 or 0.0. `format`: the last assistant message submits one query; `executes`: the query
    runs without an error; `shape`: its result has as many rows and columns as the gold query's."""
    query = _submitted(_last_content(trajectory))
    if query is None:
        return {"format": 0.0, "executes": 0.0, "shape": 0.0}
    truth = row["ground_truth"]
    with closing(_fresh_database(truth)) as database:
        found, gold = database.run(query), database.run(truth["sql"])
    sizes = [(len(result.rows), len(result.columns)) for result in (found, gold)]
    runs = found.error is None
    return {"format": 1.0, "executes": float(runs), "shape": float(runs and sizes[0] == sizes[1])}


def _last_content(trajectory: Trajectory) -> object:
    """Return the content of the last assistant message."""
    responses = [message for message in trajectory.messages if message.get("role") == "assistant"]
    return responses[-1].get("content") if responses else None


def _submitted(content: object) -> str | None:
    """Return the query between the only `<solution>` and `</solution>` of a message, without a Markdown fence; else
    None."""
    if not isinstance(content, str):
        return None
    before, _, rest = content.split("</think>")[-1].partition("<solution>")
    query, closed, after = rest.partition("</solution>")
    if not closed or any(tag in part for part in (before, query, after) for tag in TAGS):
        return None
    query = query.strip()
    if len(query) > 6 and query.startswith("```") and query.endswith("```"):
        query = query[3:-3].strip()
        for language in ("sqlite", "sql"):
            if query[: len(language) + 1].lower().split() == [language]:
                query = query[len(language) :].strip()
    return query or None


def _fresh_database(truth: dict[str, Any]) -> SqlSandbox:
    if "script" in truth:
        return SqlSandbox.from_script(truth["script"], LIMITS)
    return SqlSandbox.from_path(truth["db"], LIMITS)


def sorts_rows(sql: str) -> bool:
    """Whether the outermost query sorts its rows; if the parser fails, any ORDER BY counts."""
    import sqlglot

    try:
        statements = sqlglot.parse(sql, read="sqlite")  # a comment after a semicolon is a statement too
        return any(statement is not None and statement.args.get("order") is not None for statement in statements)
    except sqlglot.errors.SqlglotError:
        return "order by" in " ".join(sql.lower().split())


def _is_constant(database: SqlSandbox, query: str, sql: str, gold: SqlResult) -> bool:
    """Whether the query never gives gold's rows when the content of the database changes.

    Rows of only zero, empty and NULL values count only if gold has no other new rows, and a larger number of the same
    rows only if gold has no new rows at all. If gold is empty on every copy, the query counts as a constant. A query
    that equals gold's text needs no altered databases. After twice the cost of the most expensive query, it counts as
    wrong on the databases that are left.
    """
    if query == sql.strip():
        return False
    agrees: dict[str, list[bool]] = {"values": [], "zeros": [], "numbers": []}
    spent = [0.0, 0.0]  # the shares of the instructions and of the wall time that one query may take
    for other in alterations(database, gold.tables, _literals(sql)):
        with closing(other):
            expected = other.run(sql)
            kind = None if expected.error is not None or expected.truncated else _change(expected, gold)
            if kind is not None and max(spent) > 2:
                agrees[kind].append(False)
            elif kind is not None:
                answer = other.run(query)
                spent[0] += answer.operations / LIMITS.operations
                spent[1] += answer.seconds / LIMITS.seconds
                agrees[kind].append(_equal(answer, expected, ordered=False))
        if any(agrees["values"]):
            return False
    evidence = next((found for found in agrees.values() if found), None)
    return not gold.rows if evidence is None else not any(evidence)


def _change(expected: SqlResult, gold: SqlResult) -> str | None:
    """Return how altered content changes the rows of gold: `values` or `zeros` (new rows), `numbers` (more of the same
    rows), or None."""
    seen = frozenset(gold.rows)
    new = [row for row in expected.rows if row not in seen]
    if not new:
        return "numbers" if len(expected.rows) > len(gold.rows) else None
    return "zeros" if all(value in (None, 0, "", b"") for row in expected.rows for value in row) else "values"


def _literals(sql: str) -> list[str]:
    """Return the texts and numbers in a query. SQLite treats a quoted name that matches no column as text."""
    import sqlglot
    from sqlglot import expressions

    try:
        tree = sqlglot.parse_one(sql, read="sqlite")
    except sqlglot.errors.SqlglotError:
        return []
    texts = {literal.this for literal in tree.find_all(expressions.Literal)}
    names = {name.this for name in tree.find_all(expressions.Identifier) if name.args.get("quoted")}
    return sorted(texts | names)


def _equal(answer: SqlResult, gold: SqlResult, ordered: bool) -> bool:
    if any(result.error is not None or result.truncated for result in (answer, gold)):
        return False
    if len(answer.columns) != len(gold.columns) or len(answer.rows) != len(gold.rows):
        return False
    if not gold.rows and answer.tables != gold.tables:
        return False  # any false condition gives an empty result
    if gold.tables and answer.tables.isdisjoint(gold.tables):
        return False  # a constant, not a query of the data
    rows = [[_key(row) for row in result.rows] for result in (answer, gold)]
    return rows[0] == rows[1] if ordered else sorted(rows[0]) == sorted(rows[1])


def _key(row: tuple[Any, ...]) -> tuple[tuple[str, Any], ...]:
    """Return a sort key of a row that is comparable with all others, because SQLite mixes types in a column. Floats are
    rounded to ten digits."""
    return tuple(_value_key(value) for value in row)


def _value_key(value: Any) -> tuple[str, Any]:
    if value is None:
        return ("null", 0)
    if isinstance(value, int | float):
        return ("number", float(f"{value:.10g}") if isinstance(value, float) else value)
    return (type(value).__name__, value)
