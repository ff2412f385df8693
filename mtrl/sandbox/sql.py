"""Hostile SQL: each episode has its own read-only SQLite database, with limits that do not depend on the clock.

The cost of a query is counted in SQLite's own instructions, so the verdict on a slow query is the same on a loaded
machine as on an idle one; wall time is only a backstop. Memory is bounded by the length limit on every value, by the
limits on the result, and by `PRAGMA hard_heap_limit`. Nothing is written to disk: sorts and temporary tables stay in
memory, because SQLite has no limit on spilled data, and a sort of long values wrote gigabytes within seconds.

The memory for the compilation of a query is not counted, and a kilobyte of nested `with` compiles to gigabytes. Only
the heap limit stops it, for all sandboxes of the process together. A query that runs out of memory early is therefore
retried, because another query may be the cause, and files are copied into memory only while there is room for queries.
"""

from __future__ import annotations

import os
import re
import sqlite3
import threading
import time
import weakref
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

from mtrl.errors import UserError
from mtrl.sandbox.sql_functions import FormatError, bounded_printf, freeze_clock

COPY_LIMIT = 8 * 2**20
"""Maximum size in bytes of files that are copied into memory. Larger files are read in place, also read-only, because
copies for hundreds of episodes would not fit."""
HEAP_LIMIT = 2**29
"""Maximum number of bytes that SQLite may hold in this process. The limit can be lowered, never raised."""
COPIES_LIMIT = 2**28
"""Maximum number of those bytes for copies of database files; further files are read in place."""

_OPERATIONS_PER_CHECK = 50
"""Number of instructions between two checks. It is small, because one instruction can be slow: `instr` of two long
texts takes a tenth of a second."""
_READABLE_PRAGMAS = frozenset(
    (
        "table_info",
        "table_xinfo",
        "table_list",
        "index_list",
        "index_info",
        "index_xinfo",
        "foreign_key_list",
        "data_version",
    )  # FTS5 reads data_version before every search; it never changes, because nothing writes
)
_UNREPEATABLE = frozenset(("random", "randomblob"))
_REFUSED_FUNCTIONS = _UNREPEATABLE | {"load_extension", "readfile", "writefile", "edit", "fts3_tokenizer"}
_ENGINE_LIMITS = {
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: 20_000,
    sqlite3.SQLITE_LIMIT_EXPR_DEPTH: 200,
    sqlite3.SQLITE_LIMIT_COMPOUND_SELECT: 100,
    sqlite3.SQLITE_LIMIT_VDBE_OP: 100_000,
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
    sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 1_000,
    sqlite3.SQLITE_LIMIT_WORKER_THREADS: 0,
    sqlite3.SQLITE_LIMIT_COLUMN: 256,  # a row of 2000 long values is 400 MB
}
_VALUE_BYTES = 56
"""Memory of a value without its text: an object of Python and its place in the row."""
_EXPLANATION = ["addr", "opcode", "p1", "p2", "p3", "p4", "p5", "comment"]
"""Columns of the result of EXPLAIN."""
_POINTER = re.compile("vtab:[0-9A-Fa-f]+")
"""Address of a virtual table, which EXPLAIN shows and which differs from process to process."""
_NO_MEMORY = "the query takes too much memory"
_PATIENCE_SECONDS = 2.0
"""Seconds for which a query is retried. A query that takes half a gigabyte by itself needs longer for one attempt."""


@dataclass(frozen=True)
class QueryLimits:
    """Limits of one query."""

    operations: int = 100_000_000
    """Number of SQLite instructions, counted in steps of 50; the default takes about two seconds of one core."""
    seconds: float = 10.0
    """Wall time in seconds, the backstop for single instructions that are slow."""
    rows: int = 100_000
    result_bytes: int = 64_000_000
    """Memory of the result in bytes, at most: 56 for each value, and 1 for each byte of blobs and texts in ASCII, or 4
    for each character of other texts. A result of more is cut."""
    value_bytes: int = 100_000
    """Length of any text or blob in bytes, whether stored, computed or intermediate."""


@dataclass(frozen=True)
class SqlResult:
    """Result of a query. With `error` set there are no columns and no rows."""

    columns: list[str] = field(default_factory=list)
    rows: list[tuple[Any, ...]] = field(default_factory=list)
    truncated: bool = False
    """Whether the query has more rows than the limits allow."""
    error: str | None = None
    tables: frozenset[str] = frozenset()
    """Stored tables and views that the query reads, without `sqlite_master` and the tables in which virtual tables
    store their content, which SQLite reads by itself."""
    operations: int = 0
    """Number of SQLite instructions that the query took, see `QueryLimits.operations`."""
    seconds: float = field(default=0.0, compare=False)
    """Wall time in seconds. It is no part of the value of the result, because it differs between runs."""


class SqlSandbox:
    """A private, read-only database. Any thread may use it, but one at a time.

    Example::

        sandbox = SqlSandbox.from_script("create table t(a); insert into t values (1)")
        sandbox.run("select a from t").rows      # [(1,)]
        sandbox.run("drop table t").error        # 'only SELECT queries are allowed'
        sandbox.close()
    """

    def __init__(self, connection: sqlite3.Connection, limits: QueryLimits = QueryLimits()):
        self.limits = limits
        self._connection = connection
        self._lock = threading.Lock()
        self._closing = False
        self._release = lambda: None
        self._start()
        self._harden()

    @classmethod
    def from_script(cls, script: str, limits: QueryLimits = QueryLimits()) -> SqlSandbox:
        """Make a database from a trusted script of CREATE and INSERT statements."""
        return cls(_in_memory(_image_of_script(script)), limits)

    @classmethod
    def from_path(cls, path: str | Path, limits: QueryLimits = QueryLimits()) -> SqlSandbox:
        """Open a database file, as a copy in memory or, if it is large, read-only in place.

        Raises:
            UserError: the file is missing or is not an SQLite database.
        """
        file = Path(os.path.expanduser(path))  # unlike the method of Path, it keeps a `~USER` without such a user
        if not file.is_file():
            raise UserError(f"database {file} does not exist; check the row's path and environment.config.db_path")
        stat = file.stat()
        with file.open("rb") as stream:
            if stream.read(16) != b"SQLite format 3\0":
                raise UserError(f"database {file} is not an SQLite 3 file; convert it, or correct the row's path")
        if stat.st_size > COPY_LIMIT or not _copies.reserve(stat.st_size):
            return cls(_in_place(file), limits)
        try:
            sandbox = cls(_in_memory(_image_of_file(file, stat.st_size, stat.st_mtime_ns)), limits)
        except BaseException:
            _copies.release(stat.st_size)
            raise
        sandbox._release = weakref.finalize(sandbox, _copies.release, stat.st_size)
        return sandbox

    def run(self, sql: str, rows: int | None = None) -> SqlResult:
        """Execute one SELECT, and return at most `rows` of its rows (default: the limit), in SQLite's order."""
        most = min(rows or self.limits.rows, self.limits.rows)
        with self._lock:
            begun = time.monotonic()
            patience = begun + _PATIENCE_SECONDS
            result = self._attempt(sql, most)
            while result.error == _NO_MEMORY and time.monotonic() < patience and not self._closing:
                time.sleep(0.05)
                result = self._attempt(sql, most)
            return replace(result, operations=self._operations, seconds=time.monotonic() - begun)

    def close(self) -> None:
        """Free the memory. A query that still runs in another thread is stopped first."""
        self._closing = True
        with self._lock:
            self._connection.close()
        self._release()

    def _harden(self) -> None:
        connection = self._connection
        connection.text_factory = _text
        connection.execute("pragma temp_store = memory")
        connection.execute("pragma query_only = on")
        connection.execute(f"pragma hard_heap_limit = {HEAP_LIMIT}")
        with suppress(sqlite3.Error):  # tables may be wider than results; the first query reports a broken schema
            connection.execute("select 1 from sqlite_master limit 0")
        for name in ("printf", "format"):
            connection.create_function(name, -1, self._printf, deterministic=True)
        freeze_clock(connection)
        connection.set_progress_handler(self._check, _OPERATIONS_PER_CHECK)
        self._uncounted = {"sqlite_master"} | _open_virtual_tables(connection)
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, self.limits.value_bytes)
        for category, value in _ENGINE_LIMITS.items():
            connection.setlimit(category, value)
        connection.set_authorizer(self._authorize)

    def _attempt(self, sql: str, most_rows: int) -> SqlResult:
        self._start()
        try:
            cursor = self._connection.execute(sql)
            try:
                return self._collect(cursor, most_rows)
            finally:
                cursor.close()
        except (sqlite3.Error, sqlite3.Warning, UnicodeError, MemoryError) as error:
            return SqlResult(error=self._explain(error))

    def _start(self) -> None:
        self._operations = 0
        self._deadline = time.monotonic() + self.limits.seconds
        self._stopped = self._refused = ""
        self._tables: set[str] = set()

    def _authorize(self, action: int, first: str | None, second: str | None, *_: str | None) -> int:
        """Allow only actions that read. The refusal is stored, because SQLite itself reports only 'not authorized'."""
        if action == sqlite3.SQLITE_READ:
            self._tables.add(first or "")
        elif action == sqlite3.SQLITE_PRAGMA and (first or "").lower() not in _READABLE_PRAGMAS:
            self._refused = f"PRAGMA {first} is not allowed"
        elif action == sqlite3.SQLITE_FUNCTION and (second or "").lower() in _REFUSED_FUNCTIONS:
            reason = ": results must repeat" if (second or "").lower() in _UNREPEATABLE else ""
            self._refused = f"function {second}() is not allowed{reason}"
        elif action not in _READING and (action, first) != _DECLARES_TABLE_FUNCTION:
            self._refused = "only SELECT queries are allowed"
        return sqlite3.SQLITE_DENY if self._refused else sqlite3.SQLITE_OK

    def _printf(self, *arguments: Any) -> Any:
        """Format by `bounded_printf`, and store its error, because SQLite reports only that a function failed."""
        try:
            return bounded_printf(self.limits.value_bytes, *arguments)
        except FormatError as error:
            self._refused = str(error)
            raise

    def _check(self) -> bool:
        """Check the limits; SQLite calls this between instructions, and True stops the query."""
        self._operations += _OPERATIONS_PER_CHECK
        if self._operations > self.limits.operations:
            self._stopped = f"the query takes more than {self.limits.operations} instructions"
        elif time.monotonic() > self._deadline:
            self._stopped = f"the query takes more than {self.limits.seconds:g} seconds"
        return self._closing or bool(self._stopped)

    def _collect(self, cursor: sqlite3.Cursor, most_rows: int) -> SqlResult:
        if cursor.description is None:
            return SqlResult(error="there is no query")
        rows: list[tuple[Any, ...]] = []
        size = 0
        for row in cursor:
            size += _size(row)
            if len(rows) == most_rows or size > self.limits.result_bytes:
                return self._result(cursor, rows, truncated=True)
            rows.append(row)
        return self._result(cursor, rows, truncated=False)

    def _result(self, cursor: sqlite3.Cursor, rows: list[tuple[Any, ...]], truncated: bool) -> SqlResult:
        columns = [column[0] for column in cursor.description]
        if columns == _EXPLANATION:
            rows = [(*row[:5], "vtab" if _POINTER.fullmatch(str(row[5])) else row[5], *row[6:]) for row in rows]
        return SqlResult(columns, rows, truncated, tables=frozenset(self._tables - self._uncounted))

    def _explain(self, error: BaseException) -> str:
        """Return why the query failed, in words that are the same on every machine."""
        if self._stopped or self._refused:
            return self._stopped or self._refused
        if isinstance(error, MemoryError):
            return _NO_MEMORY
        if isinstance(error, UnicodeError):
            return "the query is not valid text"
        if "one statement at a time" in str(error):
            return "write one statement at a time"
        return str(error)[:300]


class _Copies:
    """Counts the bytes of memory that copies of database files hold."""

    def __init__(self) -> None:
        self.held = 0
        self._lock = threading.Lock()

    def reserve(self, size: int) -> bool:
        """Reserve `size` bytes if there is room for them; return whether there is."""
        with self._lock:
            fits = self.held + size <= COPIES_LIMIT
            self.held += size * fits
            return fits

    def release(self, size: int) -> None:
        with self._lock:
            self.held -= size


_copies = _Copies()


_READING = frozenset(
    (
        sqlite3.SQLITE_SELECT,
        sqlite3.SQLITE_READ,
        sqlite3.SQLITE_FUNCTION,
        sqlite3.SQLITE_PRAGMA,
        sqlite3.SQLITE_RECURSIVE,
    )
)
_DECLARES_TABLE_FUNCTION = (sqlite3.SQLITE_UPDATE, "sqlite_master")
"""Action that SQLite requests before the first use of `pragma_table_info('t')` or `json_each(x)`. SQLite itself
refuses a real UPDATE of that table, and `query_only` is set too."""


def _open_virtual_tables(connection: sqlite3.Connection) -> set[str]:
    """Open the virtual tables before the authorizer is set. At their first use, FTS3, FTS4 and R-trees prepare a PRAGMA
    and writing statements on their own tables, which the authorizer refuses. `limit 0` reads no row, and the connection
    is `query_only` already.

    Returns:
        Names of the tables in which virtual tables store their content; a query reads these or not, depending on
        earlier queries.
    """
    quoted = """select '"' || replace(name, '"', '""') || '"' from sqlite_master where sql like 'create virtual %'"""
    with suppress(sqlite3.Error):  # the first query reports a broken schema
        names = [str(name) for (name,) in connection.execute(quoted)]
        for name in names:
            with suppress(sqlite3.Error, MemoryError):
                connection.execute(f"select 1 from {name} limit 0")
        if names:
            return {row[0] for row in connection.execute("select name from pragma_table_list where type = 'shadow'")}
    return set()


def _text(data: bytes) -> str:
    """Decode text with replacement characters, because real databases hold text that is not UTF-8."""
    return data.decode("utf-8", "replace")


def _size(row: Iterable[Any]) -> int:
    """Return the memory of a row, see `QueryLimits.result_bytes`. It is counted by numbers of our own, since those of
    `sys.getsizeof` differ between versions of Python."""
    return sum(_VALUE_BYTES + _text_bytes(value) for value in row)


def _text_bytes(value: Any) -> int:
    if isinstance(value, str):
        return len(value) if value.isascii() else 4 * len(value)
    return len(value) if isinstance(value, bytes) else 0


def _connect(target: str, uri: bool = False) -> sqlite3.Connection:
    return sqlite3.connect(target, uri=uri, isolation_level=None, check_same_thread=False, cached_statements=0)


def _in_memory(image: bytes) -> sqlite3.Connection:
    connection = _connect(":memory:")
    connection.deserialize(image)
    return connection


def _in_place(file: Path) -> sqlite3.Connection:
    """Open the file itself read-only. It is immutable (no locks, works in a read-only folder) unless a WAL holds newer
    pages."""
    wal = file.with_name(file.name + "-wal")
    mode = "mode=ro" if wal.is_file() and wal.stat().st_size else "mode=ro&immutable=1"
    return _connect(f"file:{quote(str(file.resolve()))}?{mode}", uri=True)


@lru_cache(maxsize=512)
def _image_of_script(script: str) -> bytes:
    connection = _connect(":memory:")
    try:
        connection.executescript(script)
        return connection.serialize()
    except sqlite3.Error as error:
        raise UserError(f"ground_truth.script={script[:60]!r} fails ({error}); correct the row") from error
    finally:
        connection.close()


@lru_cache(maxsize=32)
def _image_of_file(file: Path, size: int, modified: int) -> bytes:
    """Return the bytes of a database file. `size` and `modified` are for the cache: a changed file is read again."""
    connection = _in_place(file)
    try:
        image = bytearray(connection.serialize())
    except sqlite3.Error as error:
        raise UserError(f"database {file} cannot be read ({error}); repair it, or correct the row's path") from error
    finally:
        connection.close()
    image[18:20] = b"\x01\x01"  # the header's mark for WAL mode, which a database in memory does not have
    return bytes(image)
