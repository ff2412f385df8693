"""Hostile queries in the SQL sandbox: limits of time, memory and disk, and equal results of repetitions."""

import os
from contextlib import contextmanager
from pathlib import Path

import pytest
from attack_kit import MEGABYTE, measured
from sql_resource_attacks import ATTACKS

from mtrl.sandbox.sql import HEAP_LIMIT, QueryLimits, SqlSandbox

SCRIPT = """
create table goods (fee integer, hue text);
insert into goods values (12, 'RED'), (40, 'BLUE'), (25, 'RED'), (25, null);
create view dear as select * from goods where fee > 20;
"""
LIMITS = QueryLimits(
    operations=100_000, seconds=20.0
)  # no query takes so long, and the result of one that did could differ
MARGIN_SECONDS = 30.0
"""Additional time on a busy machine, in seconds."""
LARGEST = HEAP_LIMIT + 48 * MEGABYTE
"""Maximum memory of SQLite, and of the copies of a result in Python, in bytes."""


@contextmanager
def disk(folder):
    """Check that SQLite writes no temporary file: its folder stays empty, and the process opens no deleted file.

    SQLite deletes its temporary files when it opens them.
    """
    before = _deleted()
    yield
    assert list(folder.iterdir()) == [] and _deleted() <= before


def _deleted():
    links = []
    for path in Path("/proc/self/fd").iterdir():
        try:
            links.append(os.readlink(path))
        except OSError:
            continue
    return {link for link in links if link.endswith("(deleted)")}


def _written():
    """Return the number of bytes that this process has written."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("wchar")).split()[1])


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("SQLITE_TMPDIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ATTACKS)
def test_a_hostile_query_ends_within_limits_and_repeats(name, folder):
    results, query = [], ATTACKS[name]
    for _ in range(2):
        sandbox = SqlSandbox.from_script(SCRIPT, LIMITS)
        written = _written()
        with measured() as usage, disk(folder):
            result = sandbox.run(query)
        assert _written() - written < MEGABYTE / 10
        assert usage.seconds < LIMITS.seconds + MARGIN_SECONDS and usage.bytes < LARGEST
        results.append((result, sandbox.run("select fee from goods order by fee").rows))
        sandbox.close()
    assert results[0] == results[1]
    assert results[0][1] == [(12,), (25,), (25,), (40,)], "the database is unchanged"
    assert result.error is None or 0 < len(result.error) <= 300


def test_there_are_enough_queries():
    assert len(set(ATTACKS.values())) == len(ATTACKS) >= 65
