"""Scorer and reward: two pieces of code, one truth."""

import ast
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import envs.text_to_sql.scorer as scorer_module
from envs.text_to_sql import FAMILY
from envs.text_to_sql.demonstrator import demonstrate
from envs.text_to_sql.reward import is_ordered
from envs.text_to_sql.scorer import _sorts, score


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


def test_weak_players_are_scored_as_they_are_rewarded(splits, reward_of, trajectory_of):
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
        ("select fee from goods where hue = 'PINK'", "select qty from goods where 0", 1),
        ("select fee from goods where hue = 'PINK'", "select qty, fee from goods where 0", 0),
        ("select fee from goods where hue = 'PINK'", "select 1 where 0", 0),
        ("select fee from goods where hue = 'PINK'", "select name from sqlite_master where 0", 0),
        ("select fee from goods where hue = 'PINK'", "select fee from goods", 0),
        ("select null, x'00', 1.5, 'a' from goods", "select null, x'00', 1.5, 'a' from goods limit 4", 1),
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
    assert is_ordered(sql) is _sorts(sql) is ordered


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
def test_the_reward_is_never_more_forgiving_than_the_score(response, make_row, play, trajectory_of):
    row = make_row()
    correct = play(row, [response])[0].components["correct"]
    assert correct <= score(trajectory_of([response]), row)


@settings(max_examples=300, deadline=None)
@given(before=st.lists(FRAGMENTS, max_size=3).map("".join), after=st.lists(FRAGMENTS, max_size=3).map("".join))
def test_what_surrounds_a_solution_is_read_alike(before, after, make_row, play, trajectory_of):
    row = make_row()
    response = f"{before}<solution>{row['ground_truth']['sql']}</solution>{after}"
    assert play(row, [response])[0].components["correct"] == score(trajectory_of([response]), row)
