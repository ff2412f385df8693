"""The scorer of text_to_sql against the reward: independent code with the same results."""

import ast
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import envs.text_to_sql.reward as reward_module
import envs.text_to_sql.scorer as scorer_module
from envs.text_to_sql import FAMILY
from envs.text_to_sql.demonstrator import demonstrate
from envs.text_to_sql.problem import Problem
from envs.text_to_sql.reward import is_ordered
from envs.text_to_sql.scorer import score, sorts_rows
from mtrl.sandbox.sql import QueryLimits, SqlSandbox


@pytest.fixture
def both(reward_of, trajectory_of):
    """The reward and the score of submitting a query; they must agree."""

    def judge(row, query):
        responses = [f"<solution>{query}</solution>"]
        reward, scored = reward_of(row, responses), score(trajectory_of(responses), row)
        assert reward == scored, (query, reward, scored)
        return scored

    return judge


def test_the_scorer_imports_nothing_of_the_reward():
    tree = ast.parse(Path(scorer_module.__file__).read_text())
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not [module for module in modules if module and module.startswith("envs")]


def test_gold_scores_one_on_500_rows(splits, play, trajectory_of):
    for row in [*splits.train[:250], *splits.test[:250]]:
        responses = FAMILY.gold(row)
        results = play(row, responses)
        assert sum(result.reward for result in results) == 1.0
        assert score(trajectory_of(responses), row) == 1.0


def test_the_text_of_gold_needs_no_altered_database(splits, both, monkeypatch):
    def refuse(*_):
        raise AssertionError("an altered database was made")

    row = splits.train[0]
    sql = row["ground_truth"]["sql"]
    for module in (scorer_module, reward_module):
        monkeypatch.setattr(module, "alterations", refuse)
    assert both(row, sql) == 1.0
    with pytest.raises(AssertionError):
        both(row, f"select * from ({sql})")


@pytest.mark.parametrize("otherwise", ["25", "0"])
def test_a_query_that_is_slow_on_altered_content_alone_runs_a_few_times(
    otherwise, make_row, reward_of, trajectory_of, monkeypatch
):
    """Its result on the first databases decides nothing if gold has other rows on those on which it runs no more."""
    slow = "(with recursive c(n) as (select 1 union all select n + 1 from c limit 1000) select count(*) from c)"
    query = f"select case when min(fee) = 12 then 3 else {otherwise} + 0 * {slow} end from goods"
    row = make_row(sql="select count(*) from goods where hue = 'RED'")
    runs, run = [], SqlSandbox.run

    def counted(sandbox, sql, *arguments, **options):
        runs.append(sql)
        return run(sandbox, sql, *arguments, **options)

    monkeypatch.setattr(SqlSandbox, "run", counted)
    monkeypatch.setattr(scorer_module, "LIMITS", QueryLimits(operations=20_000))

    for some, submitted in ((range(2, 10), query), (range(15, 99), query.replace("1000", "1"))):
        solution = f"<solution>{submitted}</solution>"
        for judged in (
            lambda text: reward_of(row, [text], query_operations=20_000),
            lambda text: score(trajectory_of([text]), row),
        ):
            runs.clear()
            assert judged(solution) == 0.0
            assert runs.count(submitted) in some


def test_reward_and_score_agree_on_demonstrations(splits, reward_of, trajectory_of):
    for index, row in enumerate(splits.train[:500]):
        responses = demonstrate(row, random.Random(index)).responses
        assert reward_of(row, responses) == score(trajectory_of(responses), row)


@pytest.mark.parametrize(
    ("gold", "query", "right"),
    [
        ("select label from goods where hue = 'RED'", "select label from goods where hue like 're%'", 1),
        ("select label from goods where hue = 'RED'", "select label as x from goods g where g.hue = 'RED';", 1),
        ("select label from goods where hue = 'RED'", "select label from goods where hue = 'RED' order by fee desc", 1),
        ("select label from goods where hue = 'RED'", "select distinct label from goods where hue = 'RED'", 0),
        ("select distinct label from goods", "select label from goods", 0),
        ("select label from goods", "select label, fee from goods", 0),
        ("select label, fee from goods", "select fee, label from goods", 0),
        ("select label from goods order by fee, qty", "select label from goods order by fee desc, qty", 0),
        ("select label from goods order by fee, qty", "select label from goods order by fee", 1),
        (
            "select label from goods union select 'X' order by 1",
            "select 'X' union select label from goods order by 1 desc",
            0,
        ),
        ("select label from (select * from goods order by fee)", "select label from goods order by fee desc", 1),
        ("select avg(fee * 0.1) from goods", "select sum(fee * 0.1) / count(*) from goods", 1),
        ("select avg(fee) from goods", "select avg(fee) + 0.001 from goods", 0),
        ("select count(*) from goods", "select count(*) * 1.0 from goods", 1),
        ("select max(fee) from goods", "select cast(max(fee) as text) from goods", 0),
        ("select max(fee) from goods", "select 40", 0),
        ("select max(fee) from goods", "selec max(fee) from goods", 0),
        ("select max(fee) from goods", "drop table goods", 0),
        ("select fee from goods where hue = 'PINK'", "select qty from goods where 0", 0),
        ("select fee from goods where hue = 'PINK'", "select qty, fee from goods where 0", 0),
        ("select fee from goods where hue = 'PINK'", "select 1 where 0", 0),
        ("select fee from goods where hue = 'PINK'", "select name from sqlite_master where 0", 0),
        ("select fee from goods where hue = 'PINK'", "select fee from goods", 0),
        ("select null, x'00', 1.5, 'a' from goods", "select null, x'00', 1.5, 'a' from goods where 1", 1),
    ],
)
def test_strict_comparison(gold, query, right, make_row, both):
    assert both(make_row(gold), query) == right


@pytest.mark.parametrize(
    ("sql", "ordered"),
    [
        ("select a from t order by a", True),
        ("SELECT a FROM t ORDER\n BY a LIMIT 3", True),
        ("with x as (select 1 order by 1) select * from x", False),
        ("with x as (select 1) select * from x order by 1", True),
        ("select a from t union select b from u order by 1", True),
        ("select rank() over (order by a) from t", False),
        ("select a from (select a from t order by a (b))", False),
        ("select 'order by' from t", False),
        ('select a as "order by" from t -- order by a', False),
        ("select a /* order by */ from t where b in (select b from u order by b limit 1)", False),
        ("select '(' from t order by a", True),
        ("select a from t order by a; -- the end", True),
        ("/* first */ select a from t order by a;", True),
    ],
)
def test_reward_and_scorer_see_the_same_order(sql, ordered):
    assert is_ordered(sql) is sorts_rows(sql) is ordered


def test_only_the_last_message_counts(make_row, trajectory_of):
    row = make_row()
    right = f"<solution>{row['ground_truth']['sql']}</solution>"
    assert score(trajectory_of([right]), row) == 1.0
    assert score(trajectory_of([right, "<sql>select 1</sql>"]), row) == 0.0
    assert score(trajectory_of([]), row) == 0.0
    assert score(trajectory_of([right + right]), row) == 0.0
    assert score(trajectory_of(["<sql>select 1</sql>" + right]), row) == 0.0
    assert score(trajectory_of([f"<think>maybe {right}</think>"]), row) == 0.0
    assert score(trajectory_of([f"<think>{right}</think>{right}"]), row) == 1.0


TAGS = ["<sql>", "</sql>", "<solution>", "</solution>", "<think>", "</think>", "<observation>"]
TEXTS = ["```", "```sql\n", "sql ", "\n", " ", ";", "x", "select 25", "select max(fee) from goods where hue = 'RED'"]
FRAGMENTS = st.sampled_from(TAGS + TEXTS)


@settings(max_examples=500, deadline=None)
@given(response=st.lists(FRAGMENTS, max_size=9).map("".join))
def test_the_reward_never_accepts_more_than_the_score(response, make_row, play, trajectory_of):
    row = make_row()
    correct = play(row, [response])[0].components["correct"]
    assert correct <= score(trajectory_of([response]), row)


@settings(max_examples=300, deadline=None)
@given(before=st.lists(FRAGMENTS, max_size=3).map("".join), after=st.lists(FRAGMENTS, max_size=3).map("".join))
def test_what_surrounds_a_solution_is_read_alike(before, after, make_row, play, trajectory_of):
    row = make_row()
    response = f"{before}<solution>{row['ground_truth']['sql']}</solution>{after}"
    assert play(row, [response])[0].components["correct"] == score(trajectory_of([response]), row)


SINGERS = (
    "create table singer(id integer primary key, name text unique, country text, age integer);"
    "insert into singer values (1,'Ann','FR',20),(2,'Bo','FR',31),(3,'Cy','US',44),(4,'Di','US',52),(5,'Ed','NL',23),"
    "(6,'Flo','NL',35);"
)


@pytest.mark.parametrize(
    ("gold", "query", "right"),
    [
        ("select count(*) from singer", "select 6 from singer limit 1", 0),
        ("select count(*) from singer", "select max(6) from singer", 0),
        ("select count(*) from singer where country = 'FR'", "select 2 from singer where country = 'FR' limit 1", 0),
        ("select name from singer where age = 44", "select 'Cy' from singer where age = 44", 0),
        ("select name from singer where age > 40", "select * from (values ('Cy'), ('Di')) where exists (select 1 from "
         "singer)", 0),
        ("select name from singer where age > 90", "select name from singer limit 0", 0),
        ("select name from singer where country = 'DE'", "select name from singer where 1 = 0", 0),
        ("select count(*) from singer", "select count(distinct name) from singer", 1),
        ("select count(*) from singer", "select max(rowid) from singer", 1),
        ("select name from singer where age = 44", "select name from singer where id = 3", 1),
        ("select count(*) from singer where country = 'DE'", "select sum(country = 'DE') from singer", 1),
        ("select name from singer where age > 90", "select name from singer where not age <= 90", 1),
        ("select name from singer where country = 'DE'", "select s.name from singer s where s.country like 'DE'", 1),
    ],
)  # fmt: skip
def test_a_result_that_does_not_follow_the_content_is_no_answer(both, gold, query, right):
    row = {"id": "r", "prompt": [], "ground_truth": {"sql": gold, "script": SINGERS}}
    assert both(row, gold) == 1
    assert both(row, query) == right


SHELVES = """
create table shelf(id integer primary key, title text, year integer, genre text, city text, price real);
insert into shelf values (1,'Dune',1965,'scifi','paris',9.5),(2,'Emma',1815,'novel','london',5.25),
(3,'Ulysses',1922,'novel','dublin',12),(4,'Neuromancer',1984,'scifi','rome',7.75),(5,'It',1986,'horror','paris',8),
(6,'Odes',1995,'poetry','rome',3.5);
create table loan(id integer primary key, shelf_id integer references shelf(id), reader text, year integer);
insert into loan values (1,1,'Ann',2001),(2,1,'Bo',2002),(3,4,'Ann',2003);
"""
NO_SHELF = "select title from shelf limit 0"
NO_LOAN = "select 1 from shelf, loan limit 0"


@pytest.mark.parametrize(
    ("gold", "constant"),
    [
        ("select title from shelf where genre = 'poetry' and city = 'oslo'", NO_SHELF),
        ("select title from shelf where year > 2050 and genre = 'poetry'", NO_SHELF),
        ("select title from shelf where year < 1990 and genre = 'poetry'", NO_SHELF),
        ("select title from shelf where price > 4.1 and price < 4.2", NO_SHELF),
        ("select title from shelf where (genre = 'a' and city = 'b') or (genre = 'c' and city = 'd')", NO_SHELF),
        ("select title from shelf where genre = 'a' and city = 'b' and year = 1 and price > 100", NO_SHELF),
        ("select genre from shelf group by genre having count(*) > 100", NO_SHELF),
        ("select title from shelf where year is null", NO_SHELF),
        ("select title from shelf where length(title) > 100", NO_SHELF),
        ("select title from shelf except select title from shelf where price < 100", NO_SHELF),
        ("select s.title from shelf s join loan l on l.shelf_id = s.id where s.genre = 'drama' and l.year = 2020",
         NO_LOAN),
        ("select title from shelf where genre = 'drama' and id not in (select shelf_id from loan)", NO_LOAN),
        ("select count(*) from shelf where genre = 'poetry' and city = 'oslo'", "select 0 from shelf limit 1"),
        ("select sum(price) from shelf where genre = 'poetry' and city = 'oslo'", "select NULL from shelf limit 1"),
        ("select count(distinct genre) from shelf", "select 4 from shelf limit 1"),
        ("select count(*) > 5 from shelf", "select 1 from shelf limit 1"),
        ("select 'yes' from shelf where year = 1815", "select 'yes' from shelf limit 1"),
    ],
)  # fmt: skip
def test_a_constant_is_found_where_no_row_meets_the_conditions(both, gold, constant):
    row = {"id": "r", "prompt": [], "ground_truth": {"sql": gold, "script": SHELVES}}
    assert both(row, f"select * from ({gold})") == 1
    assert both(row, constant) == 0


def test_an_unchangeable_empty_result_is_right_only_for_the_text_of_gold(both):
    row = {"id": "r", "prompt": [], "ground_truth": {"sql": "select title from shelf where 1 = 0", "script": SHELVES}}
    assert both(row, "select title from shelf where 1 = 0") == 1
    assert both(row, NO_SHELF) == 0


@pytest.mark.parametrize("large", ["zeroblob(150000)", "replace(hex(zeroblob(80000)), '0', 'x')"])
def test_a_constant_is_found_beside_a_value_that_no_query_can_read(large, make_row, both):
    script = (
        f"create table t (fee integer, hue text, picture); insert into t values (12, 'RED', {large}), (25, 'RED', 1)"
    )
    row = make_row(sql="select max(fee) from t where hue = 'RED'", script=script)
    assert both(row, "select 25 from t limit 1") == 0.0
    assert both(row, "select max(fee) from t where hue like 'red'") == 1.0
    assert both(make_row(sql="select hue from t where picture is null", script=script), "select hue from t") == 0.0


def test_a_table_without_rows_is_filled(both):
    script = "create table shelf(title text, genre text)"
    row = {
        "id": "r",
        "prompt": [],
        "ground_truth": {"sql": "select title from shelf where genre = 'a'", "script": script},
    }
    assert both(row, "select title from shelf where genre in ('a')") == 1
    assert both(row, NO_SHELF) == 0


@pytest.mark.parametrize(
    ("gold", "constant"),
    [
        ("select count(*) from note where body match 'hello'", "select 1 from note limit 1"),
        ("select body from note where body match 'absent'", "select body from note where body match 'x' limit 0"),
        ("select id from box where low <= 1 and high >= 1", "select 1 from box limit 1"),
    ],
)
def test_constants_are_found_in_virtual_tables(both, gold, constant):
    script = (
        "create virtual table note using fts4(body); insert into note values ('hello world'), ('other words');"
        "create virtual table box using rtree(id, low, high); insert into box values (1, 0, 2), (2, 5, 6);"
    )
    row = {"id": "r", "prompt": [], "ground_truth": {"sql": gold, "script": script}}
    assert both(row, f"select * from ({gold})") == 1
    assert both(row, constant) == 0


def test_equivalent_queries_are_rewarded_on_generated_rows(splits, both):
    for row in [*splits.train[:40], *splits.test[:40]]:
        gold, problem = row["ground_truth"]["sql"], Problem(**row["problem"])
        column, value = problem.columns[problem.category], problem.spell(problem.word)
        assert both(row, gold.replace(f"{column} = '{value}'", f"not {column} <> '{value}'")) == 1
        assert both(row, gold.replace(" from ", " from (select * from ").replace(" where ", ") where ")) == 1


def test_the_decoy_of_an_empty_result_reads_all_tables_of_gold(both):
    sql = "select s.title from shelf s join loan l on l.shelf_id = s.id where s.genre = 'drama' and l.year = 2020"
    row = {"id": "r", "prompt": [], "ground_truth": {"sql": sql, "script": SHELVES}}
    query = FAMILY.decoys(row)[0].partition("<solution>")[2].partition("</solution>")[0]
    assert query == 'select 1 from "loan", "shelf" limit 0'
    assert both(row, query) == 0


def test_the_decoys_hold_the_result_as_a_constant(both):
    row = {"id": "r", "prompt": [], "ground_truth": {"sql": "select count(*) from singer", "script": SINGERS}}
    decoy = FAMILY.decoys(row)[0]
    query = decoy.partition("<solution>")[2].partition("</solution>")[0]
    assert query == 'select * from (values (6)) where exists (select 1 from "singer")'
    assert both(row, query) == 0
