"""The SQL sandbox: allowed queries, refused queries, and limits of a query."""

import resource
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtrl.errors import UserError
from mtrl.sandbox import sql as module
from mtrl.sandbox.sql import QueryLimits, SqlSandbox

SCRIPT = "create table t(a integer, b text); insert into t values (3, 'x'), (1, 'y'), (2, 'x'), (1, 'y');"
FOREVER = "with recursive c(n) as (select 1 union all select n + 1 from c) select max(n) from c"
ROOT = Path(__file__).parents[2]


@pytest.fixture
def sandbox():
    sandbox = SqlSandbox.from_script(SCRIPT)
    yield sandbox
    sandbox.close()


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "some data.sqlite"
    with sqlite3.connect(path) as connection:
        connection.executescript(SCRIPT)
    connection.close()
    return path


def test_rows_keep_their_order_duplicates_and_column_names(sandbox):
    result = sandbox.run("select a, b as letter, a from t")
    assert result.columns == ["a", "letter", "a"]
    assert result.rows == [(3, "x", 3), (1, "y", 1), (2, "x", 2), (1, "y", 1)]
    assert (result.error, result.truncated, result.tables) == (None, False, {"t"})


@pytest.mark.parametrize(
    "query",
    [
        "attach database '/tmp/mtrl-attached.db' as other",
        "attach ':memory:' as other",
        "detach main",
        "insert into t values (9, 'z')",
        "with x as (select 1) delete from t",
        "update t set a = 0",
        "create table u(a)",
        "create temp table u(a)",
        "drop table t",
        "alter table t rename to u",
        "vacuum",
        "vacuum into '/tmp/mtrl-vacuumed.db'",
        "analyze",
        "begin",
        "savepoint s",
        "update sqlite_master set sql = ''",
        "pragma query_only = off",
        "pragma writable_schema = on",
        "pragma journal_mode = wal",
        "pragma database_list",
        "select * from pragma_database_list",
        "select load_extension('libm.so')",
        "select random()",
        "select hex(randomblob(200000000))",
        "select hex(zeroblob(200000000))",
        "select 1; select 2",
        "select 1; drop table t",
        "",
        "-- nothing",
        "select ?",
        "select '\udc80'",
        "select 1\0",
        "nonsense",
    ],
)
def test_refused_queries_have_no_effect(sandbox, query):
    result = sandbox.run(query)
    assert result.error
    assert not result.rows and not result.columns
    assert sandbox.run("select sum(a), count(*) from t").rows == [(7, 4)]
    assert not list(Path("/tmp").glob("mtrl-*.db"))


def test_refusals_have_a_reason(sandbox):
    assert sandbox.run("drop table t").error == "only SELECT queries are allowed"
    assert sandbox.run("pragma database_list").error == "PRAGMA database_list is not allowed"
    assert sandbox.run("select random()").error == "function random() is not allowed: results must repeat"
    assert sandbox.run("select 1; select 2").error == "write one statement at a time"
    assert sandbox.run("select c from t").error == "no such column: c"


@pytest.mark.parametrize(
    "query",
    [
        "select name, sql from sqlite_master",
        "pragma table_info(t)",
        "select name from pragma_table_info('t')",
        "select value from json_each('[1, 2]')",
        "with recursive c(n) as (select 1 union all select n + 1 from c where n < 5) select sum(n) from c",
        "select b, count(*) over (partition by b) from t order by a;",
        "values (1, 2)",
    ],
)
def test_reading_is_allowed(sandbox, query):
    result = sandbox.run(query)
    assert result.error is None
    assert result.rows


def test_tables_do_not_depend_on_earlier_queries(sandbox):
    first, again = (sandbox.run("select a from t, json_each('[1]')").tables for _ in range(2))
    assert first == again == {"t", "json_each"}


def test_the_cost_of_a_query_is_counted(sandbox):
    one, many = sandbox.run("select a from t"), sandbox.run("select t.a from t, t as u, t as v, t as w")
    assert 0 <= one.operations < 100 < many.operations and many.seconds > 0
    assert many == sandbox.run("select t.a from t, t as u, t as v, t as w")


def test_an_explanation_holds_no_address_of_memory(sandbox):
    rows = sandbox.run("explain select * from t, json_each('[1]')").rows
    assert [row[5] for row in rows if row[1] == "VOpen"] == ["vtab"]


def test_the_limit_of_instructions_does_not_depend_on_the_clock():
    sandbox = SqlSandbox.from_script(SCRIPT, QueryLimits(operations=50_000, seconds=60))
    assert sandbox.run(FOREVER).error == "the query takes more than 50000 instructions"
    assert sandbox.run("select count(*) from t").rows == [(4,)], "the limit applies to each query separately"


def test_wall_time_is_the_backstop():
    sandbox = SqlSandbox.from_script(SCRIPT, QueryLimits(operations=10**12, seconds=0.05))
    start = time.monotonic()
    assert sandbox.run(FOREVER).error == "the query takes more than 0.05 seconds"
    assert time.monotonic() - start < 5


def test_the_memory_of_a_query_is_limited():
    """Sorts stay in memory, below the heap limit; the environment of SkyRL used 2 GiB for this query."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    sandbox = SqlSandbox.from_script(SCRIPT, QueryLimits(seconds=3))
    grow = (
        "with recursive c(n) as (select 1 union all select n + 1 from c) select printf('%10000d', n) from c order by 1"
    )
    assert sandbox.run(grow).error
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1.2 * module.HEAP_LIMIT / 1024


def test_results_are_bounded_in_rows_values_and_bytes():
    many = "with recursive c(n) as (select 1 union all select n + 1 from c) select n, printf('%1000d', n) from c"
    sandbox = SqlSandbox.from_script(SCRIPT, QueryLimits(rows=7, result_bytes=10_000))
    assert (len(sandbox.run(many).rows), sandbox.run(many).truncated) == (7, True)
    assert len(sandbox.run(many, rows=3).rows) == 3
    assert not sandbox.run("select a from t", rows=4).truncated, "exactly the requested number of rows"
    sandbox = SqlSandbox.from_script(SCRIPT, QueryLimits(result_bytes=10_000))
    assert (len(sandbox.run(many).rows), sandbox.run(many).truncated) == (8, True)
    wide = f"with recursive c(n) as (select 1 union all select n + 1 from c) select {', '.join(['NULL'] * 250)} from c"
    assert len(sandbox.run(wide).rows) < 10, "values without a text take memory too"
    assert len(sandbox.run(many.replace("'%1000d'", "'%250d€'")).rows) == 8, "such characters take up to four bytes"
    assert SqlSandbox.from_script(SCRIPT, QueryLimits(value_bytes=99)).run("select hex(zeroblob(50))").error


def test_results_never_contain_the_path_of_a_copied_file(file):
    before = file.read_bytes()
    sandbox = SqlSandbox.from_path(file)
    for query in ("pragma database_list", "attach 'x' as y", "select * from nope", "create table u(a)", "selec"):
        assert str(file.parent) not in str(sandbox.run(query))
    with sqlite3.connect(file) as connection:
        connection.execute("delete from t")
    connection.close()
    assert sandbox.run("select count(*) from t").rows == [(4,)], "the copy is private"
    assert SqlSandbox.from_path(file).run("select count(*) from t").rows == [(0,)], "a changed file is read again"
    assert file.read_bytes() != before


def test_a_large_file_is_read_in_place(file, monkeypatch):
    monkeypatch.setattr(module, "COPY_LIMIT", 0)
    before = file.read_bytes()
    sandbox = SqlSandbox.from_path(file)
    assert sandbox.run("select count(*) from t").rows == [(4,)]
    assert sandbox.run("delete from t").error
    assert str(file) not in str(sandbox.run("pragma database_list"))
    assert file.read_bytes() == before
    assert [path.name for path in file.parent.iterdir()] == [file.name]


@pytest.mark.parametrize("copy_limit", [0, module.COPY_LIMIT])
def test_wal_databases(file, monkeypatch, copy_limit):
    monkeypatch.setattr(module, "COPY_LIMIT", copy_limit)
    writer = sqlite3.connect(file)
    writer.execute("pragma journal_mode = wal")
    writer.execute("insert into t values (5, 'new')")
    writer.commit()
    assert SqlSandbox.from_path(file).run("select count(*) from t").rows == [(5,)]
    writer.close()
    assert SqlSandbox.from_path(file).run("select count(*) from t").rows == [(5,)]


def test_invalid_files_and_scripts_are_user_errors(tmp_path):
    with pytest.raises(UserError, match="nowhere.sqlite does not exist"):
        SqlSandbox.from_path(tmp_path / "nowhere.sqlite")
    (tmp_path / "text.sqlite").write_text("not a database, but long enough to look like one")
    with pytest.raises(UserError, match="text.sqlite is not an SQLite 3 file"):
        SqlSandbox.from_path(tmp_path / "text.sqlite")
    with pytest.raises(UserError, match=r"ground_truth.script='create tabel t' fails"):
        SqlSandbox.from_script("create tabel t")


def test_text_that_is_not_utf8_is_decoded_with_replacements():
    sandbox = SqlSandbox.from_script("create table t(a text); insert into t values (cast(x'61ff' as text));")
    assert sandbox.run("select a from t").rows == [("a\ufffd",)]


def test_sandboxes_are_private():
    one, other = SqlSandbox.from_script(SCRIPT), SqlSandbox.from_script(SCRIPT)
    one.close()
    assert other.run("select count(*) from t").rows == [(4,)]
    assert one.run("select 1").error


def test_close_from_another_thread_stops_a_running_query():
    sandbox = SqlSandbox.from_script(SCRIPT, QueryLimits(operations=10**12, seconds=60))
    results = []
    thread = threading.Thread(target=lambda: results.append(sandbox.run(FOREVER)))
    thread.start()
    time.sleep(0.05)
    sandbox.close()
    sandbox.close()
    thread.join(timeout=5)
    assert not thread.is_alive()
    assert results[0].error


def test_sandboxes_run_in_many_threads():
    def work():
        sandbox = SqlSandbox.from_script(SCRIPT)
        seen.append(sandbox.run("select a from t order by a, b").rows)
        sandbox.close()

    seen: list = []
    threads = [threading.Thread(target=work) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [[(1,), (1,), (2,), (3,)]] * 16


def test_same_bytes_in_every_process():
    code = (
        "from mtrl.sandbox.sql import *\n"
        f"s = SqlSandbox.from_script({SCRIPT!r})\n"
        "for q in ('select * from t order by b', 'select distinct b from t', 'select * from t join t u using (b)',\n"
        f"          'select zzz from t', 'pragma table_info(t)', {FOREVER!r}.replace('select max(n)', 'select n')):\n"
        "    r = s.run(q, rows=50); print(r.columns, r.rows, r.truncated, r.error, sorted(r.tables))\n"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, cwd=ROOT, capture_output=True, check=True
        ).stdout
        for seed in ("0", "1", "2")
    }
    assert len(outputs) == 1


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=60))
def test_any_text_gives_a_result_and_changes_nothing(text):
    sandbox = SqlSandbox.from_script(SCRIPT, QueryLimits(operations=100_000))
    result = sandbox.run(text)
    assert (result.error is None) or not result.rows
    assert sandbox.run("select count(*) from t").rows == [(4,)]
    sandbox.close()


def test_the_total_size_of_copied_files_is_limited(file, monkeypatch):
    """Without room for another copy, the file is read in place: the rows are equal, and nothing is written."""
    with sqlite3.connect(file) as connection:
        connection.execute("create table much as select zeroblob(1000000)")
    connection.close()
    # The file is much larger than all copies that other tests may have left.
    monkeypatch.setattr(module, "COPIES_LIMIT", 3 * file.stat().st_size - 1)
    for _ in range(2):  # closed sandboxes leave room for the copies of the next ones
        sandboxes = [SqlSandbox.from_path(file) for _ in range(4)]
        assert times_open(file) == 2, "two sandboxes read the file, and two hold copies"
        assert [sandbox.run("select sum(a) from t").rows for sandbox in sandboxes] == [[(7,)]] * 4
        assert all(sandbox.run("delete from t").error for sandbox in sandboxes)
        for sandbox in sandboxes:
            sandbox.close()
            sandbox.close()
        assert times_open(file) == 0


def times_open(file):
    """Number of descriptors of a file that this process holds."""
    found = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the descriptor of the folder itself
            found += descriptor.readlink() == file
    return found


def test_tables_may_be_wider_than_results():
    columns = [f"c{n}" for n in range(300)]
    sandbox = SqlSandbox.from_script(f"create table w({','.join(columns)}); insert into w(c299) values (7)")
    assert sandbox.run("select c299 from w").rows == [(7,)]
    assert sandbox.run("select * from w").error == "too many columns in result set"
    sandbox.close()


def test_a_sort_of_long_values_writes_nothing_to_disk(sandbox, tmp_path):
    """Temporary files of SQLite have no name, so the bytes that the process writes are counted."""

    def written():
        lines = Path("/proc/self/io").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("wchar")).split()[1])

    query = (
        "with recursive c(x) as (select 1 union all select x + 1 from c where x < 3000) "
        "select hex(zeroblob(30000)) || x from c order by 1"
    )
    before = written()
    sandbox.run(query, rows=1)
    assert written() - before < 2**20


VIRTUAL_TABLES = [
    ("fts3(a)", "select a from d where a match 'hello'", [("hello world",)]),
    ("fts4(a)", "select snippet(d) from d where d match 'hello'", [("<b>hello</b> world",)]),
    ("fts5(a)", "select a from d where d match 'hello' order by rank", [("hello world",)]),
    ("rtree(i, low, high)", "select i from d where low <= 1 and high >= 1", [(1,)]),
]


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(("kind", "query", "rows"), VIRTUAL_TABLES)
def test_virtual_tables_are_read_and_never_written(kind, query, rows, in_place, tmp_path, monkeypatch):
    content = "(1, 0, 2), (2, 5, 6)" if kind.startswith("rtree") else "('hello world'), ('other words')"
    with sqlite3.connect(tmp_path / "a.sqlite") as connection:
        connection.executescript(f"create virtual table d using {kind}; insert into d values {content}")
    connection.close()
    if in_place:
        monkeypatch.setattr(module, "COPY_LIMIT", 0)
    sandbox = SqlSandbox.from_path(tmp_path / "a.sqlite")
    for _ in range(2):
        result = sandbox.run(query)
        assert (result.rows, result.tables) == (rows, {"d"})
    for hostile in ("insert into d select * from d", "delete from d", "drop table d", "select optimize(d) from d"):
        assert sandbox.run(hostile).error
    assert sandbox.run("pragma page_size").error == "PRAGMA page_size is not allowed"
    assert sandbox.run("select count(*) from d").rows == [(2,)]
    sandbox.close()


@pytest.mark.parametrize("kind", ["fts4(a, content=endless)", "fts5(a, content='endless')"])
def test_a_virtual_table_over_an_endless_view_does_not_end_the_sandbox(kind):
    script = f'create view endless(a) as {FOREVER}; create virtual table "a""b" using {kind}; create table t(a)'
    sandbox = SqlSandbox.from_script(script, QueryLimits(operations=10_000))
    assert sandbox.run("select count(*) from t").rows == [(0,)]
    assert sandbox.run('select count(*) from "a""b"').error
    sandbox.close()
