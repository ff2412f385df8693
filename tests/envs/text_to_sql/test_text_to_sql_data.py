"""Rows: generated, SkyRL's, plain ones, and a real database."""

import json
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest

from envs.text_to_sql import FAMILY
from envs.text_to_sql.data import is_held_out
from envs.text_to_sql.problem import Problem
from mtrl.config.schema import DataConfig
from mtrl.errors import UserError
from mtrl.sandbox.sql import SqlSandbox

SCRIPT = "CREATE TABLE goods (fee integer, hue text); insert into goods values (12, 'RED'), (25, 'BLUE');"
CHINOOK = Path(__file__).parents[4] / "shared" / "data" / "chinook" / "Chinook_Sqlite.sqlite"


def make_database(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(SCRIPT)
    return path


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def check_gold(reward_of, trajectory_of):
    """Gold is rewarded and scored 1."""

    def check(row):
        assert reward_of(row, FAMILY.gold(row)) == 1.0
        assert FAMILY.score(trajectory_of(FAMILY.gold(row)), row) == 1.0

    return check


# Generated rows


def test_generated_rows_are_complete_and_json(splits):
    assert (len(splits.train), len(splits.test)) == (4096, 256)
    assert json.loads(json.dumps(splits.train)) == splits.train
    ids = [row["id"] for row in splits.train + splits.test]
    assert len(set(ids)) == len(ids)
    assert all(len(row["prompt"]) == 1 and row["prompt"][0]["content"].isascii() for row in splits.train)


def test_splits_share_no_problem_whatever_the_seed(splits):
    other = FAMILY.load(DataConfig(), seed=1)
    train = {row["key"] for row in splits.train + other.train}
    test = {row["key"] for row in splits.test + other.test}
    assert not train & test
    assert all(is_held_out(key) for key in test) and not any(map(is_held_out, train))
    assert all(row["key"] == row["ground_truth"]["sql"] for row in splits.train)


def test_generation_is_a_function_of_the_seed(splits):
    again = FAMILY.load(DataConfig(max_test_rows=None), seed=0)
    assert again == splits
    assert FAMILY.load(DataConfig(), seed=1).train != splits.train


def test_row_counts_are_as_requested():
    few = FAMILY.load(DataConfig(synthetic_train_rows=20, synthetic_test_rows=9, max_train_rows=5, max_test_rows=3), 0)
    assert (len(few.train), len(few.test)) == (5, 3)


def test_no_generated_gold_is_empty_or_reached_by_a_shortcut(splits):
    for row in splits.train[:1000]:
        problem = Problem(**row["problem"])
        gold = row["ground_truth"]["sql"]
        with closing(SqlSandbox.from_script(row["ground_truth"]["script"])) as database:
            rows = database.run(gold).rows
            assert rows and rows[0][0] is not None
            unfiltered = gold.replace(gold[gold.index(" where") : gold.index("'", gold.index("'") + 1) + 1], "")
            assert database.run(unfiltered).rows != rows
            if problem.ask == "sorted":
                assert sorted(rows) != rows or database.run(gold.partition(" order")[0]).rows != rows


def test_queries_that_ignore_the_word_of_the_question_are_seldom_right(splits):
    """Rows with another word of the table are as likely to be asked for, whatever distinguishes their word."""
    kinds = ("count(*) desc", "count(*)", "min(rowid)", "max({price}) desc", "min({price})", "sum({stock}) desc")
    right, asked = Counter(), Counter()
    for row in splits.train[:1000]:
        problem, gold = Problem(**row["problem"]), row["ground_truth"]["sql"]
        category, table = problem.columns[problem.category], problem.table
        asked[problem.ask] += 1
        with closing(SqlSandbox.from_script(row["ground_truth"]["script"])) as database:
            wanted = database.run(gold).rows
            for kind in kinds:
                order = kind.format(**problem.columns)
                word = f"(select {category} from {table} group by {category} order by {order} limit 1)"
                query = gold.replace(f"'{problem.spell(problem.word)}'", word)
                right[problem.ask, kind] += database.run(query).rows == wanted
    assert max(right[ask, kind] / asked[ask] for ask, kind in right) < 0.6


def test_the_question_reveals_no_name(splits):
    for row in splits.train[:1000]:
        words = set(row["question"].split())
        problem = Problem(**row["problem"])
        assert not words & set(problem.columns.values())
        assert (problem.table in words) == problem.named


def test_gold_queries_reveal_all_names(splits, play):
    row = next(row for row in splits.train if not row["problem"]["named"])
    observations = [result.observation for result in play(row, FAMILY.gold(row)) if result.observation]
    assert row["problem"]["table"] in observations[0]
    assert all(name in observations[1] for name in row["problem"]["columns"].values())


def test_full_prompts_for_language_models(play, check_gold):
    row = FAMILY.load(DataConfig(synthetic_train_rows=2, synthetic_test_rows=1), 0, prompt="full").train[0]
    assert [message["role"] for message in row["prompt"]] == ["system", "user"]
    assert row["question"] in row["prompt"][1]["content"] and "<solution>" in row["prompt"][0]["content"]
    assert "<reminder>" in play(row, FAMILY.gold(row))[0].observation
    check_gold(row)


# SkyRL's rows

LAYOUT = {
    "synsql": "SynSQL-2.5M/databases/shop/shop.sqlite",
    "spider": "spider/database/shop/shop.sqlite",
    "bird": "bird/train/train_databases/shop/shop.sqlite",
}


def skyrl_row(data, number):
    return {
        "data_source": "synsql",
        "prompt": [
            {"role": "system", "content": "You are a data science expert."},
            {"role": "user", "content": f"Q{number}"},
        ],
        "env_class": "text2sql",
        "reward_spec": {"method": "rule", "ground_truth": "SELECT count(*) FROM goods"},
        "db_id": "shop",
        "data": data,
    }


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_skyrl_rows(tmp_path, kind, check_gold):
    for place in LAYOUT.values():
        make_database(tmp_path / "databases" / place)
    train = [skyrl_row(data, number) for number, data in enumerate(LAYOUT)]
    folder = tmp_path / "rows"
    folder.mkdir()
    for name, rows in (("train", train), ("validation", [skyrl_row("spider", 9)])):
        if kind == "jsonl":
            write_jsonl(folder / f"{name}.jsonl", rows)
        else:
            pyarrow = pytest.importorskip("pyarrow")
            parquet = pytest.importorskip("pyarrow.parquet")
            parquet.write_table(pyarrow.Table.from_pylist(rows), folder / f"{name}.parquet")
    splits = FAMILY.load(DataConfig(path=str(folder)), 0, db_path=str(tmp_path / "databases"))
    assert [row["ground_truth"]["db"].removeprefix(str(tmp_path / "databases") + "/") for row in splits.train] == list(
        LAYOUT.values()
    )
    assert splits.train[0]["prompt"] == train[0]["prompt"]
    assert len(splits.test) == 1
    for row in splits.train + splits.test:
        check_gold(row)


@pytest.mark.parametrize(
    ("change", "config", "message"),
    [
        ({}, {}, "row train-0 has db_id='shop'; set environment.config.db_path"),
        ({"data": "oracle"}, {"db_path": "."}, "data='oracle'; with db_id it must be one of synsql, spider, bird"),
        (
            {"db_id": "nowhere"},
            {"db_path": "/nowhere"},
            "row train-0: database /nowhere/.*nowhere.sqlite does not exist",
        ),
    ],
)
def test_bad_skyrl_rows(tmp_path, change, config, message):
    for name in ("train", "test"):
        write_jsonl(tmp_path / f"{name}.jsonl", [{**skyrl_row("spider", name), **change}])
    with pytest.raises(UserError, match=message):
        FAMILY.load(DataConfig(path=str(tmp_path)), 0, **config)


# Plain rows


def plain_rows(count=9, **changes):
    return [
        {"question": f"how many? ({number})", "sql": "select count(*) from goods", "db": "data/shop.sqlite", **changes}
        for number in range(count)
    ]


def test_plain_rows_beside_their_databases(tmp_path, check_gold):
    make_database(tmp_path / "data" / "shop.sqlite")
    file = write_jsonl(tmp_path / "rows.jsonl", plain_rows())
    splits = FAMILY.load(DataConfig(path=str(file)), 0)
    assert splits.train and splits.test
    assert not {row["question"] for row in splits.train} & {row["question"] for row in splits.test}
    row = splits.train[0]
    assert row["ground_truth"] == {
        "sql": "select count(*) from goods",
        "db": str((tmp_path / "data/shop.sqlite").resolve()),
    }
    assert "CREATE TABLE goods (fee integer" in row["prompt"][1]["content"]
    assert row["prompt"][1]["content"].endswith(f"Question: {row['question']}")
    check_gold(row)


def test_column_names_of_spider_and_bird(tmp_path, check_gold):
    make_database(tmp_path / "data" / "shop.sqlite")
    rows = [{**row, column: row["sql"]} for row, column in zip(plain_rows(), ["query", "SQL"] * 5, strict=False)]
    tree = {"select": [False, []], "from": {"table_units": []}}  # Spider's own files have it beside the query
    rows = [{**row, "sql": tree, "evidence": "goods are wares"} for row in rows]
    splits = FAMILY.load(DataConfig(path=str(write_jsonl(tmp_path / "rows.jsonl", rows))), 0)
    assert "Hint: goods are wares" in splits.train[0]["prompt"][1]["content"]
    for row in splits.train:
        check_gold(row)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"db": "nowhere.sqlite"}, "nowhere.sqlite does not exist"),
        ({"db": None}, "has db=None; write the path"),
        ({"sql": " "}, "has no gold query; add a column sql"),
        ({"sql": 3}, "has no gold query"),
        ({"question": None}, "has no prompt"),
    ],
)
def test_bad_plain_rows(tmp_path, changes, message):
    make_database(tmp_path / "data" / "shop.sqlite")
    file = write_jsonl(tmp_path / "rows.jsonl", plain_rows(**changes))
    with pytest.raises(UserError, match=message):
        FAMILY.load(DataConfig(path=str(file)), 0)


# A real database


@pytest.mark.skipif(not CHINOOK.is_file(), reason=f"the Chinook database is not at {CHINOOK}")
def test_chinook(tmp_path, play, trajectory_of, check_gold):
    questions = {
        "Which five artists have the most tracks?": "SELECT ar.Name, COUNT(*) AS n FROM Artist ar"
        " JOIN Album al USING (ArtistId) JOIN Track t USING (AlbumId)"
        " GROUP BY ar.ArtistId ORDER BY n DESC, ar.Name LIMIT 5",
        "What did each country spend?": "SELECT BillingCountry, SUM(Total) FROM Invoice GROUP BY BillingCountry",
        "Who reports to nobody?": "SELECT FirstName || ' ' || LastName FROM Employee WHERE ReportsTo IS NULL",
        "How many tracks were never sold?": "SELECT COUNT(*) FROM Track"
        " WHERE TrackId NOT IN (SELECT TrackId FROM InvoiceLine)",
    }
    rows = [{"question": question, "sql": sql, "db": str(CHINOOK)} for question, sql in questions.items()]
    splits = FAMILY.load(DataConfig(path=str(write_jsonl(tmp_path / "rows.jsonl", rows))), 0)
    for row in splits.train + splits.test:
        check_gold(row)
        results = play(row, ["<sql>select * from Track</sql>", "<sql>drop table Track</sql>"])
        assert "(more rows are not shown)" in results[0].observation and len(results[0].observation) <= 6200
        assert str(CHINOOK) not in results[0].observation + results[1].observation
    before = CHINOOK.stat()
    row = splits.train[0]
    wrong = row["ground_truth"]["sql"].replace(" DESC", "") + " -- turned around"
    scored = FAMILY.score(trajectory_of([f"<solution>{wrong}</solution>"]), row)
    assert scored == float("DESC" not in row["ground_truth"]["sql"])
    assert CHINOOK.stat() == before
