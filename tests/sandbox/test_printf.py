"""SQLite's printf with bounded widths: the same text as SQLite's own, or an error."""

import sqlite3
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtrl.sandbox.printf import FormatError, bounded_printf
from mtrl.sandbox.sql import SqlSandbox

MOST = 1000
VALUES = (
    st.none()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
    | st.binary(max_size=5)
)
PIECES = st.sampled_from(
    ["%d", "%5d", "%-9s|", "%.2f", "%08.3f", "%,d", "%%", "%x", "%c", "%Q", "%!s", "x", "é", "%*d", "%"]
)


@settings(deadline=None)
@given(st.lists(PIECES, max_size=5).map("".join), st.lists(VALUES, max_size=4))
def test_the_same_as_sqlites_own(template, values):
    if "*" in template and any(isinstance(value, int | float) and abs(value) > 200 for value in values):
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
     (b"%9999d", 1), ("%" + "9" * 40 + "d", 1), ("%*d", float("inf"), 1)],
)  # fmt: skip
def test_wide_ones_are_refused(arguments):
    with pytest.raises(FormatError, match="width of printf"):
        bounded_printf(MOST, *arguments)


def test_in_queries():
    sandbox = SqlSandbox.from_script("create table t(a); insert into t values (3.14159), (null)")
    assert sandbox.run("select printf('%.2f', a), format('%5s|', 'é') from t").rows == [
        ("3.14", "   é|"),
        ("0.00", "   é|"),
    ]
    assert sandbox.run("select printf()").rows == [(None,)] == sandbox.run("select printf(null)").rows
    error = "a width of printf is larger than 100000"
    assert sandbox.run("select printf('%.' || a || 'c', 'x'), printf('%.*c', 2000000000, 'x') from t").error == error
    assert sandbox.run("select 1").rows == [(1,)]
    sandbox.close()
