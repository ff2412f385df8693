"""Questions about a database of Chinook's form: every query has an answer, and the splits share no query."""

import json
import sqlite3
from contextlib import closing

import pytest

from envs.text_to_sql import FAMILY
from experiments.smollm2 import chinook
from mtrl.config.schema import DataConfig

SCRIPT = """
CREATE TABLE Artist (ArtistId INTEGER, Name TEXT);
CREATE TABLE Album (AlbumId INTEGER, Title TEXT, ArtistId INTEGER);
CREATE TABLE Genre (GenreId INTEGER, Name TEXT);
CREATE TABLE Track (TrackId INTEGER, Name TEXT, AlbumId INTEGER, GenreId INTEGER, Milliseconds INTEGER);
CREATE TABLE Customer (CustomerId INTEGER, FirstName TEXT, LastName TEXT, Country TEXT, Email TEXT);
CREATE TABLE Invoice (InvoiceId INTEGER, CustomerId INTEGER, BillingCity TEXT, BillingCountry TEXT, Total NUMERIC);
CREATE TABLE Unused (a);
"""
ARTISTS = ["AC/DC", "Guns N' Roses", "Céu", "Silent"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chinook")
    with closing(sqlite3.connect(folder / "all.sqlite")) as database:
        database.executescript(SCRIPT)
        database.executemany("insert into Artist values (?, ?)", enumerate(ARTISTS))
        database.executemany("insert into Album values (?, ?, ?)", [(i, f"Title '{i}", i % 3) for i in range(9)])
        database.execute("insert into Genre values (0, 'Rock')")
        tracks = [(i, f"Song {i}", i % 9, 0, 100_000 + 10_000 * i) for i in range(30)]
        database.executemany("insert into Track values (?, ?, ?, ?, ?)", tracks)
        customers = [(i, f"First{i}", "O'Neil", f"Land {i % 3}", f"{i}@example.org") for i in range(6)]
        database.executemany("insert into Customer values (?, ?, ?, ?, ?)", customers)
        invoices = [(i, i % 5, f"City {i % 4}", f"Land {i % 3}", 1.5 * i) for i in range(12)]
        database.executemany("insert into Invoice values (?, ?, ?, ?, ?)", invoices)
        database.commit()
    counts = chinook.write(folder / "all.sqlite", folder)
    assert min(counts.values()) > 5
    return folder


def rows(folder, split):
    return [json.loads(line) for line in (folder / f"{split}.jsonl").read_text().splitlines()]


def test_every_template_has_rows_and_no_query_is_in_both_splits(folder):
    train, test = rows(folder, "train"), rows(folder, "test")
    assert not {row["sql"] for row in train} & {row["sql"] for row in test}
    starts = {template.question.partition("{}")[0] for template in chinook.TEMPLATES}
    assert all(any(row["question"].startswith(start) for row in train + test) for start in starts)
    assert not any("Silent" in row["question"] for row in train + test), "an artist without albums has no answer"


def test_gold_is_rewarded(folder):
    splits = FAMILY.load(DataConfig(path=str(folder)), 0, prompt="full")
    for row in splits.train + splits.test:
        with closing(FAMILY.environment()) as environment:
            environment.reset(row)
            results = [environment.step(response, row["ground_truth"]) for response in FAMILY.gold(row)]
        assert sum(result.reward for result in results) == 1.0 and results[-1].done, row["id"]


def test_only_the_tables_of_the_part_are_there_and_writing_again_gives_the_same(folder):
    with closing(sqlite3.connect(folder / "music.sqlite")) as database:
        names = {name for (name,) in database.execute("select name from sqlite_master")}
    assert names == set(chinook.PARTS["music"])
    before = {split: rows(folder, split) for split in ("train", "test")}
    chinook.write(folder / "all.sqlite", folder)
    assert {split: rows(folder, split) for split in ("train", "test")} == before
