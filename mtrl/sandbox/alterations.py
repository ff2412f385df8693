"""Altered copies of a database: the results of a query on them show whether the query depends on the content."""

from __future__ import annotations

import random
import re
import sqlite3
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from mtrl.sandbox.sql import SqlSandbox

ROWS = 2000
"""Maximum number of rows that are copied of each table."""
MOST = 80
"""Maximum number of altered copies of one database."""
SHIFT = 1_000_003
"""Number that is added to whole columns: it is larger than most thresholds, and joins by number still match."""
LONG = "a long text " * 100
_NUMBER = re.compile(r"-?\d{1,15}(?:\.\d{1,15})?")


@dataclass(frozen=True)
class _Table:
    name: str
    columns: list[tuple[str, str]]
    """Name and declared type of each column."""
    rows: list[tuple[Any, ...]]
    keys: frozenset[int] = frozenset()
    """Indices of the columns of the primary key; without one, of the first column if its values are distinct."""
    virtual: str = ""
    """Statement that creates the table if it is virtual, such as one for full-text search; else empty."""

    def holding(self, rows: list[tuple[Any, ...]]) -> _Table:
        return replace(self, rows=rows)


def alterations(sandbox: SqlSandbox, tables: Collection[str], literals: Collection[str]) -> Iterator[SqlSandbox]:
    """Yield copies of a database with altered content, at most 80; the caller closes each.

    The first copies have all numbers shifted, then all texts changed, then half of the rows left out, then all rows
    left out. In the next copies the cells of `tables` are drawn at random from the old values, from `literals` and from
    values near either, so that several conditions hold together that no row met before; these copies have few rows,
    many rows, or the same rows many times. In the last copies each column of `tables` is altered alone, and filled with
    each of `literals`. The copies have the views, but no constraints or indexes, and at most 2000 rows per table before
    rows are drawn. A column with a value that is larger than a query may read is NULL in all of them.
    """
    copied, views = _read(sandbox)
    for altered in islice(_altered(copied, tables, literals), MOST):
        yield SqlSandbox(_build(altered, views), sandbox.limits)


def _altered(copied: list[_Table], tables: Collection[str], literals: Collection[str]) -> Iterator[list[_Table]]:
    yield [_mapped(table, _shifted) for table in copied]
    yield [_mapped(table, _suffixed) for table in copied]
    for start in (0, 1):
        yield [table.holding(table.rows[start::2]) for table in copied]
    yield [table.holding([]) for table in copied]
    yield from _mixtures(copied, tables, sorted(literals))
    for change in (_other, *(_Filled(literal) for literal in literals), _lowered):
        for place, table in enumerate(copied):
            for column in range(len(table.columns)) if table.name in tables else ():
                yield [*copied[:place], _mapped(table, change, column), *copied[place + 1 :]]


def _mapped(table: _Table, change: Any, column: int | None = None) -> _Table:
    """Apply `change` to every cell, or to the cells of one column."""
    return table.holding(
        [
            tuple(change(cell) if column in (None, index) else cell for index, cell in enumerate(row))
            for row in table.rows
        ]
    )


def _mixtures(copied: list[_Table], tables: Collection[str], literals: Sequence[str]) -> Iterator[list[_Table]]:
    """Yield copies with random cells in `tables`. The more tables gold reads, the fewer rows each copy of a table has,
    because the size of a join grows with the product of the row counts."""
    share = max(1, sum(table.name in tables for table in copied))
    for seed, recipe in enumerate(_RECIPES):
        rows = max(4, min(recipe.rows // share, 600 // share**2))
        mixture, rng = replace(recipe, rows=rows), random.Random(seed)
        yield [
            table.holding(mixture.draw(table, literals, rng) * max(recipe.times // share, 1))
            if table.name in tables
            else table
            for table in copied
        ]


@dataclass(frozen=True)
class _Mixture:
    """Parameters for drawing the cells of a copy."""

    rows: int
    unchanged: float
    """Share of the cells that keep their value."""
    keys: bool
    """Whether key columns are not drawn, but keep distinct values."""
    holes: bool = False
    """Whether cells may also become NULL or a long text."""
    times: int = 1
    """Number of copies of each row."""

    def draw(self, table: _Table, literals: Sequence[str], rng: random.Random) -> list[tuple[Any, ...]]:
        """Return rows drawn from those of a table; a table without rows gives only literals, values near them, and
        NULL."""
        old = table.rows or [(None,) * len(table.columns)]
        fitting = [_fitting(column, literals) for column in zip(*old, strict=True)]
        sources = rng.sample(old, self.rows) if self.rows <= len(old) else old * (self.rows // len(old) + 1)
        return [
            tuple(
                _nth(cell, index // len(old))
                if self.keys and column in table.keys and table.rows
                else self._drawn(cell, fitting[column], rng)
                for column, cell in enumerate(row)
            )
            for index, row in enumerate(sources[: self.rows])
        ]

    def _drawn(self, cell: Any, literals: Sequence[str], rng: random.Random) -> Any:
        chance = rng.random()
        if chance < self.unchanged:
            return cell
        if literals and chance < 0.9:
            literal = rng.choice(literals)
            return literal if rng.random() < 0.5 else rng.choice(_near(literal))
        if self.holes and rng.random() < 0.6:
            return rng.choice((None, LONG if isinstance(cell, str) else None))
        return _other(cell) if rng.random() < 0.5 else _lowered(cell)


_RECIPES = (
    _Mixture(60, 0.4, keys=True),
    _Mixture(60, 0.4, keys=False),
    _Mixture(600, 0.15, keys=True),
    _Mixture(600, 0.15, keys=False),
    _Mixture(12, 0.5, keys=True),
    _Mixture(12, 0.5, keys=False),
    _Mixture(4, 0.5, keys=True),
    _Mixture(4, 0.5, keys=False),
    _Mixture(200, 0.3, keys=True, holes=True),
    _Mixture(60, 0.4, keys=False, holes=True),
    _Mixture(12, 0.5, keys=True, holes=True),
    _Mixture(4, 0.5, keys=False, holes=True),
    _Mixture(8, 0.4, keys=False, times=150),
    _Mixture(8, 0.3, keys=False, times=150, holes=True),
)


def _fitting(cells: Sequence[Any], literals: Sequence[str]) -> Sequence[str]:
    """Return the literals that fit a column: the numbers if it holds only numbers, the texts if no cell begins with a
    number; all literals for other columns, or if none fits."""
    known = [str(cell) for cell in cells if cell is not None]
    numbers = [literal for literal in literals if _NUMBER.fullmatch(literal)]
    if known and all(map(_NUMBER.fullmatch, known)):
        return numbers or literals
    if known and not any(map(_NUMBER.match, known)):
        return [literal for literal in literals if literal not in numbers] or literals
    return literals


def _near(literal: str) -> Sequence[Any]:
    """Return values near a literal. A number gives itself as a number, values on both sides and, if it may be a year, a
    date in that year; a text gives a longer and a shorter text."""
    if not _NUMBER.fullmatch(literal):
        return f"{literal} altered", literal[:-1]
    decimals = literal.partition(".")[2]
    number = float(literal) if decimals else int(literal)
    year = (f"{literal}-06-15",) if len(literal) == 4 else ()
    return number, number + 1, number - 1, number + 0.5 * 10.0 ** -len(decimals), *year


def _nth(cell: Any, turn: int) -> Any:
    """Return a different value of a key for each `turn`; turn 0 gives the key itself."""
    if isinstance(cell, str) and turn:
        return f"{cell} {turn}"
    return cell + turn * SHIFT if isinstance(cell, int | float) and abs(cell) < 2**53 else cell


def _shifted(cell: Any) -> Any:
    return cell + SHIFT if isinstance(cell, int | float) and abs(cell) < 2**53 else cell


def _lowered(cell: Any) -> Any:
    return cell - SHIFT if isinstance(cell, int | float) and abs(cell) < 2**53 else cell


def _suffixed(cell: Any) -> Any:
    return f"{cell} altered" if isinstance(cell, str) else cell


def _other(cell: Any) -> Any:
    return _suffixed(_shifted(cell))


@dataclass(frozen=True)
class _Filled:
    """Replaces every cell by the literal, which SQLite converts to a number if the column holds numbers."""

    literal: str

    def __call__(self, cell: Any) -> Any:
        return self.literal


def _read(sandbox: SqlSandbox) -> tuple[list[_Table], list[str]]:
    """Return the tables that can be read, and the statements that create the views."""
    schema = sandbox.run("select type, name, sql from sqlite_master where name not like 'sqlite~_%' escape '~'")
    shadows = {name for (name,) in sandbox.run("select name from pragma_table_list where type = 'shadow'").rows}
    views = [str(sql) for kind, _, sql in schema.rows if kind == "view"]
    made = {str(name): str(sql) for kind, name, sql in schema.rows if kind == "table" and name not in shadows}
    read = [_read_table(sandbox, name, sql) for name, sql in made.items()]
    return [table for table in read if table is not None], views


def _read_table(sandbox: SqlSandbox, name: str, sql: str) -> _Table | None:
    text = "'" + name.replace("'", "''") + "'"
    columns = sandbox.run(f"select name, type, pk from pragma_table_xinfo({text}) where hidden <> 1").rows
    content = sandbox.run(f"select * from {_quoted(name)}", ROWS)
    if content.error:  # a value is larger than a query may read
        found = [_quoted(str(column)) for column, _, _ in columns]
        found = ["null" if sandbox.run(f"select {each} from {_quoted(name)}", ROWS).error else each for each in found]
        content = sandbox.run(f"select {', '.join(found)} from {_quoted(name)}", ROWS)
    if content.error or not columns or len(columns) != len(content.columns):
        return None
    keys = {index for index, (_, _, key) in enumerate(columns) if key}
    first = [row[0] for row in content.rows]
    if not keys and len(set(first)) == len(first):
        keys = {0}
    virtual = sql if re.match(r"create\s+virtual\b", sql, re.IGNORECASE) else ""
    return _Table(
        name, [(str(column), str(kind)) for column, kind, _ in columns], content.rows, frozenset(keys), virtual
    )


def _build(tables: list[_Table], views: list[str]) -> sqlite3.Connection:
    connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False, cached_statements=0)
    for table in tables:
        with closing(connection.cursor()) as cursor:
            _store(cursor, table)
    for view in views:
        connection.execute(view)
    return connection


def _store(cursor: sqlite3.Cursor, table: _Table) -> None:
    insert = f"insert into {_quoted(table.name)} values ({', '.join('?' * len(table.columns))})"
    if not table.virtual:
        columns = ", ".join(f"{_quoted(name)} {_quoted(kind) if kind else ''}" for name, kind in table.columns)
        cursor.execute("begin")  # one transaction: one per row takes twice the time
        cursor.execute(f"create table {_quoted(table.name)} ({columns})")
        cursor.executemany(insert, table.rows)
        cursor.execute("commit")
        return
    with suppress(sqlite3.Error):  # this SQLite lacks the module, so gold fails on the copy too
        cursor.execute(table.virtual)
        for row in table.rows:
            with suppress(sqlite3.Error):  # an R-tree accepts only numbers
                cursor.execute(insert, row)


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
