"""Demonstrations for a row: those of a weak demonstrator for the warm start of the tiny policy, and gold, which checks
the reward.

The weak demonstrator shows every kind of move, but usually submits a guess without a query, which is never right: a
policy cloned from it is mostly wrong, greedy or sampled. Reinforcement learning then teaches the policy to query first.
The proportions below set that starting point.
"""

from __future__ import annotations

import random
from contextlib import closing
from dataclasses import replace
from typing import Any

from envs.text_to_sql.problem import MEASURES, NAMES, SPELLINGS, Problem
from mtrl.environments.family import Recital
from mtrl.sandbox.sql import SqlSandbox
from mtrl.types import Row

GUESS_SHARE = 0.57
"""Share of episodes that submit a guess at once, with the words of the question as names."""
HALF_SHARE = 0.04
"""Share of episodes that query the table's name and then guess the rest; the other episodes also query a row."""
SLIP_SHARE = 0.06
"""Share of the episodes with all queries that still misspell the value or use the wrong column."""
GUESSED_TABLE = "data"
MOST_CONSTANT_ROWS = 20
"""Maximum number of rows of a result that is tried as a constant."""

SHOW_TABLES = "<sql>select name from sqlite_master</sql>"


def demonstrate(row: Row, rng: random.Random) -> Recital:
    """Return a weak demonstrator for `row`, which must be a training row."""
    if row.get("split") == "test":
        raise ValueError(f"row {row['id']} is held out and must not be demonstrated")
    if "problem" in row:
        return Recital(_weak_moves(Problem(**row["problem"]), rng))
    right, wrong = gold(row), _mistaken(row)[-1]
    if rng.random() < GUESS_SHARE:
        return Recital([wrong])
    return Recital([*right[:-1], wrong if rng.random() < SLIP_SHARE else right[-1]])


def gold(row: Row) -> list[str]:
    """Return the responses of a perfect player. It thinks before it acts, as the reward scheme `skyrl` requires."""
    looks = _looks(Problem(**row["problem"])) if "problem" in row else [SHOW_TABLES]
    return [*(f"<think>look first</think>{look}" for look in looks), _considered(row["ground_truth"]["sql"])]


def decoys(row: Row) -> list[str]:
    """Return well-formed solutions that are wrong: the right result as a constant, the right query with one mistake, or
    with a changed result."""
    return [*map(_considered, _constant(row["ground_truth"])), *_mistaken(row)]


def _mistaken(row: Row) -> list[str]:
    if "problem" in row:
        problem = Problem(**row["problem"])
        others = [replace(problem, spelling=spelling) for spelling in SPELLINGS if spelling != problem.spelling]
        if problem.ask not in ("count", "items"):
            others.append(replace(problem, measure=next(each for each in MEASURES if each != problem.measure)))
        return [_considered(other.sql) for other in (*others, _guessed(problem, GUESSED_TABLE))]
    right = f"({row['ground_truth']['sql'].rstrip().rstrip(';')}\n)"  # the newline ends a comment, if any
    return [_considered(f"select * from {right} limit 0"), _considered(f"select count(*) || ' rows' from {right}")]


def _constant(truth: dict[str, Any]) -> list[str]:
    """Return a query that reads a table of gold and returns gold's rows as literals; none if gold reads no table or has
    too many rows."""
    source = SqlSandbox.from_script(truth["script"]) if "script" in truth else SqlSandbox.from_path(truth["db"])
    with closing(source) as sandbox:
        result = sandbox.run(truth["sql"], rows=MOST_CONSTANT_ROWS)
    if result.error or result.truncated or not result.tables:
        return []
    tables = ['"' + name.replace('"', '""') + '"' for name in sorted(result.tables)]
    if not result.rows:
        return [f"select {', '.join('1' for _ in result.columns)} from {', '.join(tables)} limit 0"]
    values = ", ".join(f"({', '.join(map(_literal, row))})" for row in result.rows)
    return [f"select * from (values {values}) where exists (select 1 from {tables[0]})"]


def _literal(value: Any) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, bytes):
        return f"x'{value.hex()}'"
    return repr(value) if isinstance(value, int | float) else "'" + value.replace("'", "''") + "'"


def _weak_moves(problem: Problem, rng: random.Random) -> list[str]:
    habit = rng.random()
    if habit < GUESS_SHARE:
        return [_submit(_guessed(problem, problem.table if problem.named else GUESSED_TABLE))]
    if habit < GUESS_SHARE + HALF_SHARE:
        return [SHOW_TABLES, _submit(_guessed(problem, problem.table))]
    return [*_looks(problem), _submit(_slipped(problem, rng) if rng.random() < SLIP_SHARE else problem)]


def _looks(problem: Problem) -> list[str]:
    """Return the queries that reveal all names and spellings."""
    show_row = f"<sql>select * from {problem.table} limit 1</sql>"
    return [show_row] if problem.named else [SHOW_TABLES, show_row]


def _considered(sql: str) -> str:
    return f"<think>now the query is clear</think><solution>{sql}</solution>"


def _submit(problem: Problem) -> str:
    return f"<solution>{problem.sql}</solution>"


def _guessed(problem: Problem, table: str) -> Problem:
    """Return the problem with guessed names and spelling, without knowledge of the columns."""
    return replace(problem, table=table, columns={kind: kind for kind in NAMES}, spelling="lower")


def _slipped(problem: Problem, rng: random.Random) -> Problem:
    """Return the problem with one mistake."""
    if problem.ask in ("count", "items", "sorted") or rng.random() < 0.5:
        others = [spelling for spelling in SPELLINGS if spelling != problem.spelling]
        return replace(problem, spelling=rng.choice(others))
    return replace(problem, measure=next(measure for measure in MEASURES if measure != problem.measure))
