"""No query can tell the time."""

import time

import pytest

from mtrl.sandbox.sql import SqlSandbox


@pytest.fixture
def ask():
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
def test_the_clock_stands_still(ask, expression, value):
    assert ask(expression) == [(value,)]


def test_the_time_zone_of_the_machine_is_not_seen(ask, monkeypatch):
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        assert ask("datetime('2014-06-30 12:00:00', 'localtime')") == [("2014-06-30 12:00:00",)]
    finally:
        monkeypatch.undo()
        time.tzset()
