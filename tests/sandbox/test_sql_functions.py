"""SQLite functions that the sandbox replaces: no query can read the clock, and `printf` has bounded widths."""

import sqlite3
import time
from contextlib import closing, suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtrl.sandbox.sql import SqlSandbox
from mtrl.sandbox.sql_functions import FormatError, bounded_printf

MOST = 1000
VALUES = (
    st.none()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
    | st.binary(max_size=5)
    | st.integers(-(10**12), 10**12).map(str)
    | st.integers(0, 300).map(lambda number: f"\t +{number}é".encode())
)
PIECES = st.sampled_from(
    ["%d", "%5d", "%-9s|", "%.2f", "%08.3f", "%,d", "%%", "%x", "%c", "%Q", "%!s", "x", "é", "%*d", "%.*c", "%"]
)


@pytest.fixture
def evaluate():
    sandbox = SqlSandbox.from_script("create table t(a)")
    yield lambda expression: sandbox.run(f"select {expression}").rows
    sandbox.close()


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("current_timestamp", "2025-01-01 00:00:00"),
        ("current_date", "2025-01-01"),
        ("current_time", "00:00:00"),
        ("datetime()", "2025-01-01 00:00:00"),
        ("datetime(' NOW ')", "2025-01-01 00:00:00"),
        ("datetime(x'6e6f77')", "2025-01-01 00:00:00"),
        ("date('now', '-1 day')", "2024-12-31"),
        ("datetime('now', 'localtime')", "2025-01-01 00:00:00"),
        ("time('now', 'utc')", "00:00:00"),
        ("julianday('now')", 2460676.5),
        ("unixepoch('now')", 1735689600),
        ("strftime('%Y')", "2025"),
        ("strftime('%s', 'now')", "1735689600"),
        ("date('2014-06-30', 'start of month')", "2014-06-01"),
        ("strftime('%Y', '2014-06-30')", "2014"),
        ("date(null)", None),
        ("date('nonsense')", None),
    ],
)
def test_functions_that_read_the_clock_are_frozen(evaluate, expression, value):
    assert evaluate(expression) == [(value,)]


def test_queries_do_not_use_the_time_zone_of_the_machine(evaluate, monkeypatch):
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        assert evaluate("datetime('2014-06-30 12:00:00', 'localtime')") == [("2014-06-30 12:00:00",)]
    finally:
        monkeypatch.undo()
        time.tzset()


def as_integer(value):
    """Return the integer to which SQLite converts a value."""
    with closing(sqlite3.connect(":memory:")) as plain:
        return plain.execute("select cast(? as integer)", [value]).fetchone()[0] or 0


@settings(deadline=None)
@given(st.lists(PIECES, max_size=5).map("".join), st.lists(VALUES, max_size=4))
def test_bounded_printf_gives_the_text_of_sqlites_printf(template, values):
    if "*" in template and any(abs(as_integer(value)) > 200 for value in values):
        with suppress(FormatError):  # SQLite's own text may have gigabytes
            assert len(bounded_printf(MOST, template, *values) or "") < 10 * MOST
        return
    plain = sqlite3.connect(":memory:")
    plain.text_factory = lambda data: data.decode("utf-8", "replace")
    wanted = plain.execute(f"select printf({', '.join('?' * (1 + len(values)))})", [template, *values]).fetchone()[0]
    plain.close()
    assert bounded_printf(MOST, template, *values) == wanted


@pytest.mark.parametrize(
    "arguments",
    [("%2000000000d", 1), ("%.*c", 2000000000, "x"), ("%*d", -2000000000, 1), ("%.999999999f", 1.0), ("%600d%600d", 1,
    2),
     (b"%9999d", 1), ("%" + "9" * 40 + "d", 1), ("%*d", float("inf"), 1), ("%.*c", "2000000000", "x"),
     ("%*d", b"2000000000", 1), ("%*d", "\t -2000000000x", 1), ("%*d", "0002000", 1), ("%*d%*d", "600", 1, b"600", 2)],
)  # fmt: skip
def test_printf_refuses_large_widths(arguments):
    with pytest.raises(FormatError, match="width of printf"):
        bounded_printf(MOST, *arguments)


@pytest.mark.parametrize("width", ["000000000012", " +12 apples", b"-12", "12.9", "12e8"])
def test_printf_takes_a_text_as_a_small_width(width):
    assert len(bounded_printf(MOST, "%*d", width, 1)) == 12


@pytest.mark.parametrize("template", ["%s%s%s", b"%s%s%s"])
def test_printf_refuses_a_large_result_without_widths(template):
    assert len(bounded_printf(MOST, template, *["x" * 600] * 3)) == 1800
    with pytest.raises(FormatError, match="the result of printf has 2000 bytes or more"):
        bounded_printf(MOST, template, *["x" * 900] * 3)
    assert bounded_printf(MOST, "") is None is bounded_printf(MOST, "%y", "x" * 900)


def test_queries_use_the_bounded_printf():
    sandbox = SqlSandbox.from_script("create table t(a); insert into t values (3.14159), (null)")
    assert sandbox.run("select printf('%.2f', a), format('%5s|', 'é') from t").rows == [
        ("3.14", "   é|"),
        ("0.00", "   é|"),
    ]
    assert sandbox.run("select printf()").rows == [(None,)] == sandbox.run("select printf(null)").rows
    error = "a width of printf is larger than 100000"
    assert sandbox.run("select printf('%.' || a || 'c', 'x'), printf('%.*c', 2000000000, 'x') from t").error == error
    for width in ("'200000000'", "x'323030303030303030'", "a || '99000000'"):
        assert sandbox.run(f"select printf('%.*c', {width}, 'x') from (select 1 as a)").error == error
    assert sandbox.run("select 1").rows == [(1,)]
    sandbox.close()
