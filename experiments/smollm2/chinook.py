"""Writes questions about the Chinook database as rows for `environment=text_to_sql`.

    python experiments/smollm2/chinook.py Chinook_Sqlite.sqlite outputs/chinook

Chinook (https://github.com/lerocha/chinook-database, MIT licence) is a music shop with 11 tables. The schema of all of
them has 4,158 characters, which is long for a model of 135 M parameters. Each question is therefore about one of two
parts, which are databases of their own with all rows of their tables: `music.sqlite` and `sales.sqlite`.

A question is a template and values of the database, so that the templates of held-out questions occur in training, and
their values do not occur in training with the same template. Questions with an empty answer are left out.
"""

from __future__ import annotations

import argparse
import json
import random
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

HELD_OUT = 5
"""Number of questions of which one is held out, on average."""
PARTS = {
    "music": ("Artist", "Album", "Genre", "Track"),
    "sales": ("Customer", "Invoice"),
}
"""Tables of each part."""


@dataclass(frozen=True)
class Template:
    """A question, its query, and the query of the values that are inserted in both."""

    part: str
    question: str
    sql: str
    values: str

    def rows(self, database: sqlite3.Connection) -> Iterator[tuple[str, str]]:
        """Return question and query for all values."""
        for values in database.execute(self.values):
            quoted = [value.replace("'", "''") if isinstance(value, str) else value for value in values]
            yield self.question.format(*values), self.sql.format(*quoted)


TEMPLATES = (
    Template(
        "music",
        "How many albums does the artist {} have?",
        "SELECT COUNT(*) FROM Album JOIN Artist USING (ArtistId) WHERE Artist.Name = '{}'",
        "SELECT DISTINCT Name FROM Artist ORDER BY Name",
    ),
    Template(
        "music",
        "Which albums does the artist {} have? Sort the titles.",
        "SELECT Title FROM Album JOIN Artist USING (ArtistId) WHERE Artist.Name = '{}' ORDER BY Title",
        "SELECT DISTINCT Name FROM Artist ORDER BY Name",
    ),
    Template(
        "music",
        "Which artist made the album {}?",
        "SELECT Artist.Name FROM Artist JOIN Album USING (ArtistId) WHERE Album.Title = '{}'",
        "SELECT DISTINCT Title FROM Album ORDER BY Title",
    ),
    Template(
        "music",
        "How many tracks does the album {} have?",
        "SELECT COUNT(*) FROM Track JOIN Album USING (AlbumId) WHERE Album.Title = '{}'",
        "SELECT DISTINCT Title FROM Album ORDER BY Title",
    ),
    Template(
        "music",
        "What is the name of the longest track of the album {}?",
        "SELECT Track.Name FROM Track JOIN Album USING (AlbumId) WHERE Album.Title = '{}' "
        "ORDER BY Milliseconds DESC LIMIT 1",
        "SELECT DISTINCT Title FROM Album ORDER BY Title",
    ),
    Template(
        "music",
        "How many tracks of the genre {} are longer than {} minutes?",
        "SELECT COUNT(*) FROM Track JOIN Genre USING (GenreId) WHERE Genre.Name = '{}' AND Milliseconds > {} * 60000",
        "SELECT Name, value FROM Genre, (SELECT 3 AS value UNION SELECT 4 UNION SELECT 5 UNION SELECT 6 UNION SELECT 7)"
        " ORDER BY Name, value",
    ),
    Template(
        "sales",
        "How many customers live in {}?",
        "SELECT COUNT(*) FROM Customer WHERE Country = '{}'",
        "SELECT DISTINCT Country FROM Customer ORDER BY Country",
    ),
    Template(
        "sales",
        "What is the email of the customer {} {}?",
        "SELECT Email FROM Customer WHERE FirstName = '{}' AND LastName = '{}'",
        "SELECT FirstName, LastName FROM Customer ORDER BY FirstName, LastName",
    ),
    Template(
        "sales",
        "How many invoices does the customer {} {} have?",
        "SELECT COUNT(*) FROM Invoice JOIN Customer USING (CustomerId) WHERE FirstName = '{}' AND LastName = '{}'",
        "SELECT FirstName, LastName FROM Customer ORDER BY FirstName, LastName",
    ),
    Template(
        "sales",
        "What is the largest total of an invoice that was sent to {}?",
        "SELECT MAX(Total) FROM Invoice WHERE BillingCity = '{}'",
        "SELECT DISTINCT BillingCity FROM Invoice ORDER BY BillingCity",
    ),
    Template(
        "sales",
        "How many invoices over {} were sent to {}?",
        "SELECT COUNT(*) FROM Invoice WHERE Total > {} AND BillingCountry = '{}'",
        "SELECT value, BillingCountry FROM (SELECT DISTINCT BillingCountry FROM Invoice), "
        "(SELECT 1 AS value UNION SELECT 2 UNION SELECT 5 UNION SELECT 8) ORDER BY BillingCountry, value",
    ),
)


def write_part(source: Path, tables: tuple[str, ...], target: Path) -> None:
    """Write a database with some tables of `source`: their statements and all their rows."""
    target.unlink(missing_ok=True)
    with closing(sqlite3.connect(target)) as database:
        database.execute("ATTACH ? AS source", (f"{source.resolve().as_uri()}?mode=ro",))
        for table in tables:
            query = "SELECT sql FROM source.sqlite_master WHERE type = 'table' AND name = ?"
            (statement,) = database.execute(query, (table,)).fetchone()
            database.execute(statement)
            database.execute(f'INSERT INTO main."{table}" SELECT * FROM source."{table}"')
        database.commit()


def rows_of(database: sqlite3.Connection, part: str) -> Iterator[dict[str, str]]:
    """Return the rows of one part whose answers are not empty, zero or null."""
    for template in TEMPLATES:
        if template.part == part:
            for question, sql in template.rows(database):
                if any(any(row) for row in database.execute(sql)):
                    yield {"question": question, "sql": sql, "db": f"{part}.sqlite"}


def is_held_out(row: dict[str, str]) -> bool:
    """Whether the row belongs to the test split; a function of the query alone."""
    return sha256(row["sql"].encode()).digest()[0] % HELD_OUT == 0


def write(source: Path, folder: Path) -> dict[str, int]:
    """Write the databases, train.jsonl and test.jsonl, and return the number of rows of each split."""
    folder.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, str]] = []
    for part, tables in PARTS.items():
        write_part(source, tables, folder / f"{part}.sqlite")
        with closing(sqlite3.connect(folder / f"{part}.sqlite")) as database:
            rows += rows_of(database, part)
    random.Random(0).shuffle(rows)
    splits = {
        "train": [row for row in rows if not is_held_out(row)],
        "test": [row for row in rows if is_held_out(row)],
    }
    for split, chosen in splits.items():
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in chosen)
        (folder / f"{split}.jsonl").write_text(lines, encoding="utf-8")
    return {split: len(chosen) for split, chosen in splits.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("database", type=Path, help="Chinook_Sqlite.sqlite")
    parser.add_argument("folder", type=Path, help="folder that the files are written to")
    arguments = parser.parse_args()
    print(write(arguments.database, arguments.folder))


if __name__ == "__main__":
    main()
