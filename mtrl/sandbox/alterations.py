"""Altered copies of a database: the results of a query on them show whether the query depends on the content."""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from typing import Any

from mtrl.sandbox.sql import SqlSandbox

ROWS = 2000
"""Maximum number of rows that are copied of each table."""
MOST = 80
"""Maximum number of altered copies of one database."""
SHIFT = 1_000_003
"""Number that is added to whole columns: it is larger than most thresholds, and joins by number still match."""


@dataclass(frozen=True)
class _Table:
    name: str
    columns: list[tuple[str, str]]
    """Name and declared type of each column."""
    rows: list[tuple[Any, ...]]


def alterations(sandbox: SqlSandbox, tables: Collection[str], literals: Collection[str]) -> Iterator[SqlSandbox]:
    """Yield copies of a database with altered content, at most 80; the caller closes each.

    The first copies have all numbers shifted, then all texts changed, then half of the rows left out. In the next
    copies each column of `tables` is altered alone, and filled with each of `literals`, so that conditions hold that no
    row met before. The copies have the views, but no constraints or indexes, and at most 2000 rows per table.
    """
    kept, views = _read(sandbox)
    for altered in islice(_altered(kept, tables, literals), MOST):
        yield SqlSandbox(_build(altered, views), sandbox.limits)


def _altered(kept: list[_Table], tables: Collection[str], literals: Collection[str]) -> Iterator[list[_Table]]:
    yield [_mapped(table, _shifted) for table in kept]
    yield [_mapped(table, _suffixed) for table in kept]
    for start in (0, 1):
        yield [_Table(table.name, table.columns, table.rows[start::2]) for table in kept]
    for change in (_other, *(_Filled(literal) for literal in literals), _lowered):
        for place, table in enumerate(kept):
            for column in range(len(table.columns)) if table.name in tables else ():
                yield [*kept[:place], _mapped(table, change, column), *kept[place + 1 :]]


def _mapped(table: _Table, change: Any, column: int | None = None) -> _Table:
    """Apply `change` to every cell, or to the cells of one column."""
    rows = [
        tuple(change(cell) if column in (None, index) else cell for index, cell in enumerate(row)) for row in table.rows
    ]
    return _Table(table.name, table.columns, rows)


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
    views = [str(sql) for kind, _, sql in schema.rows if kind == "view"]
    tables = []
    for name in (str(name) for kind, name, _ in schema.rows if kind == "table"):
        columns = sandbox.run(f"select name, type from pragma_table_info('{name.replace(chr(39), chr(39) * 2)}')")
        content = sandbox.run(f"select * from {_quoted(name)}", ROWS)
        if not content.error and len(columns.rows) == len(content.columns):
            tables.append(_Table(name, [(str(column), str(kind)) for column, kind in columns.rows], content.rows))
    return tables, views


def _build(tables: list[_Table], views: list[str]) -> sqlite3.Connection:
    connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False, cached_statements=0)
    for table in tables:
        columns = ", ".join(f"{_quoted(name)} {_quoted(kind) if kind else ''}" for name, kind in table.columns)
        with closing(connection.cursor()) as cursor:
            cursor.execute(f"create table {_quoted(table.name)} ({columns})")
            marks = ", ".join("?" * len(table.columns))
            cursor.executemany(f"insert into {_quoted(table.name)} values ({marks})", table.rows)
    for view in views:
        connection.execute(view)
    return connection


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
