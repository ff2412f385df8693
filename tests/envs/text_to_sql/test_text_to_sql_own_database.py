"""A user's database file with properties of real ones: quoted names, foreign keys, money, dates, NULLs, many tables."""

import json
import random
import sqlite3
from contextlib import closing

import pytest

from envs.text_to_sql import FAMILY
from envs.text_to_sql import data as module
from mtrl.config.schema import DataConfig
from mtrl.sandbox.sql import COPY_LIMIT

SCRIPT = """
CREATE TABLE [Artist] ([ArtistId] INTEGER NOT NULL, [Name] NVARCHAR(120), CONSTRAINT [PK] PRIMARY KEY ([ArtistId]));
CREATE TABLE "Sales Invoice" (
    "Invoice Id" INTEGER PRIMARY KEY, [Artist Id] INTEGER REFERENCES [Artist] ([ArtistId]) ON DELETE NO ACTION,
    `Invoice Date` DATETIME NOT NULL, [Total] NUMERIC(10,2) NOT NULL, [Billing State] NVARCHAR(40), [order] INTEGER);
CREATE INDEX [By State] ON "Sales Invoice" ([Billing State]);
CREATE VIEW [Big Ones] AS SELECT * FROM "Sales Invoice" WHERE [Total] > 5;
INSERT INTO Artist VALUES (1, 'AC/DC'), (2, 'Antônio Carlos Jobim'), (3, NULL), (4, 'Guns N'' Roses');
INSERT INTO "Sales Invoice" VALUES
    (1, 1, '2021-01-01 00:00:00', 1.98, NULL, 2), (2, 1, '2021-02-01 00:00:00', 13.86, 'AB', 1),
    (3, 2, '2022-01-01 00:00:00', 0.99, 'AB', 4), (4, 4, '2022-06-01 12:30:00', 8.91, NULL, 3);
"""
OTHERS = "".join(f"CREATE TABLE [Extra {n}] ([Key] INTEGER PRIMARY KEY, [Value] NVARCHAR(20));\n" for n in range(9))
QUERIES = (
    'SELECT COUNT(*) FROM "Sales Invoice"',
    "SELECT Name FROM Artist WHERE Name IS NOT NULL ORDER BY Name",
    'SELECT a.Name, SUM(i.Total) FROM Artist a JOIN "Sales Invoice" i ON i.[Artist Id] = a.ArtistId GROUP BY 1',
    'SELECT AVG(Total) FROM "Sales Invoice"',
    'SELECT ROUND(SUM(Total), 2) FROM "Sales Invoice"',
    "SELECT strftime('%Y', `Invoice Date`) AS y, COUNT(*) FROM [Sales Invoice] GROUP BY y ORDER BY y",
    'SELECT a.Name FROM Artist a LEFT JOIN "Sales Invoice" i ON i.[Artist Id] = a.ArtistId WHERE i.Total IS NULL',
    'SELECT "Invoice Id", Total FROM [Big Ones] ORDER BY Total DESC LIMIT 1',
    'SELECT [Billing State], [order] FROM "Sales Invoice" ORDER BY [order]; -- the end',
    'SELECT SUM(Total) OVER (ORDER BY "Invoice Id") FROM "Sales Invoice"',
)
WRONG = (
    'SELECT COUNT(*) + 1 FROM "Sales Invoice"',
    "SELECT Name FROM Artist",
    'SELECT a.Name, a.ArtistId FROM Artist a, "Sales Invoice"',
    'SELECT AVG(Total) + 1e-6 FROM "Sales Invoice"',
    'SELECT ROUND(SUM(Total), 1) FROM "Sales Invoice"',
    "SELECT 2021, 2 UNION SELECT 2022, 2",
    "SELECT Name FROM Artist",
    'SELECT "Invoice Id", Total FROM [Sales Invoice] ORDER BY Total LIMIT 1',
    'SELECT [Billing State], [order] FROM "Sales Invoice" ORDER BY [order] DESC',
    'SELECT Total FROM "Sales Invoice"',
)


def written(file):
    """The properties of a file that writing changes; reading changes only the time of access."""
    found = file.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_mode


@pytest.fixture(params=["small", "large"])
def splits(request, tmp_path):
    """Rows of one database; the large one is read in place."""
    file = tmp_path / "music store.sqlite"
    with closing(sqlite3.connect(file)) as connection:
        connection.executescript(SCRIPT + OTHERS)
        if request.param == "large":
            connection.execute("INSERT INTO [Extra 0] VALUES (1, zeroblob(?))", (COPY_LIMIT + 1,))
            connection.commit()
    assert (file.stat().st_size > COPY_LIMIT) == (request.param == "large")
    rows = [{"question": f"Question {n}?", "sql": sql, "db": file.name} for n, sql in enumerate(QUERIES)]
    rows = [row | ({"prompt": ""} if n % 2 else {}) for n, row in enumerate(rows)]  # as Parquet and CSV may fill it
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    before = written(file)
    yield FAMILY.load(DataConfig(path=str(tmp_path / "rows.jsonl")), 0)
    assert written(file) == before and {path.name for path in tmp_path.iterdir()} == {file.name, "rows.jsonl"}


def test_gold_is_right_and_decoys_are_wrong(splits, reward_of, trajectory_of):
    wrong = dict(zip(QUERIES, WRONG, strict=True))
    rows = splits.train + splits.test
    assert len(rows) == len(QUERIES)
    for row in rows:
        right = FAMILY.gold(row)
        assert reward_of(row, right) == reward_of(row, right, reward="skyrl") == 1.0
        assert FAMILY.score(trajectory_of(right), row) == 1.0
        for response in (f"<solution>{wrong[row['ground_truth']['sql']]}</solution>", *FAMILY.decoys(row)):
            assert reward_of(row, [response]) == FAMILY.score(trajectory_of([response]), row) == 0.0, response


def test_the_prompt_contains_the_schema(splits, play):
    row = splits.train[0]
    schema = row["prompt"][1]["content"]
    assert "`Invoice Date` DATETIME NOT NULL, [Total] NUMERIC(10,2)" in schema and "CREATE VIEW [Big Ones]" in schema
    assert schema.count("CREATE TABLE") == 11 and "INDEX" not in schema
    observation = play(row, ['<sql>select * from "Sales Invoice" limit 2</sql>'])[0].observation
    assert observation.startswith(
        "<observation>Invoice Id | Artist Id | Invoice Date | Total | Billing State | order\n"
        "1 | 1 | 2021-01-01 00:00:00 | 1.98 | NULL | 2\n2 | 1 | 2021-02-01 00:00:00 | 13.86 | AB | 1\n"
    )


def test_a_cut_schema_names_the_missing_tables(tmp_path, monkeypatch):
    file = tmp_path / "store.sqlite"
    with closing(sqlite3.connect(file)) as connection:
        connection.executescript(SCRIPT + OTHERS)
    monkeypatch.setattr(module, "SCHEMA_CHARACTERS", 700)
    schema = module.schema_of(file)
    assert schema.count("CREATE TABLE") == 5 and "CREATE VIEW" in schema and len(schema) < 900
    assert schema.endswith(
        "-- 6 others: Extra 3, Extra 4, Extra 5, Extra 6, Extra 7, Extra 8. "
        "select sql from sqlite_master where name = '...' shows one"
    )
    module.schema_of.cache_clear()


def test_its_rows_have_demonstrations(splits, reward_of):
    """A quarter of the demonstrations are right, as on generated rows, and none by its first guess."""
    rewards = [
        reward_of(row, FAMILY.demonstrate(row, random.Random(n)).responses) for n in range(60) for row in splits.train
    ]
    assert 0.15 < sum(rewards) / len(rewards) < 0.4 and set(rewards) == {0.0, 1.0}
