"""Rows of the text_to_sql family: generated problems, SkyRL's text-to-SQL rows, and plain questions with a query and a
database file."""

from __future__ import annotations

import random
from contextlib import closing
from dataclasses import asdict
from functools import lru_cache, partial
from hashlib import sha256
from itertools import accumulate
from pathlib import Path
from typing import Any

from envs.text_to_sql.problem import Problem, draw, fill
from envs.text_to_sql.prompts import EXAMPLE_ROW, SCHEMA_CHARACTERS, full_prompt
from mtrl.datasets import Splits, cap, load_splits, to_row
from mtrl.errors import UserError
from mtrl.sandbox.sql import SqlSandbox
from mtrl.types import Row

HELD_OUT = 8
"""Number of problems of which one is held out, on average."""
LAYOUTS = {
    "synsql": "SynSQL-2.5M/databases/{id}/{id}.sqlite",
    "spider": "spider/database/{id}/{id}.sqlite",
    "bird": "bird/train/train_databases/{id}/{id}.sqlite",
}
"""Path of the database `db_id` below `environment.config.db_path`, by the column `data` of SkyRL's rows."""
_SHOW_SCHEMA = (
    "select name, sql from sqlite_master where type in ('table', 'view') and name not like 'sqlite_%' order by rowid"
)


def load(data: Any, seed: int, db_path: str | None = None, prompt: str = "short", **config: Any) -> Splits:
    """Return the rows of `data.path`; without a path, generated problems.

    Args:
        data: the `data` section of the config.
        seed: seed of the generated problems.
        db_path: folder of the databases of SkyRL's rows, or of relative `db` paths; None: the folder of the rows.
        prompt: full, for a language model, or short: only the question of generated rows, with short observations, and
            the full prompt without a worked example for other rows.
        config: the environment's own keys.
    """
    if data.path is None:
        return _generated(data, seed, prompt == "full")
    return load_splits(data, partial(_loaded_row, db_path=db_path, beside=_folder(data.path), example=prompt == "full"))


def worked_example(row: Row) -> Row:
    """Return the row that the worked example of full prompts solves."""
    return EXAMPLE_ROW


def is_held_out(key: str) -> bool:
    """Whether the problem belongs to the test split. This depends only on the problem, not on the seed."""
    return sha256(key.encode()).digest()[0] % HELD_OUT == 0


def _generated(data: Any, seed: int, full: bool) -> Splits:
    rng = random.Random(f"text_to_sql/{seed}")
    wanted = {"train": data.synthetic_train_rows, "test": data.synthetic_test_rows}
    rows: dict[str, list[Row]] = {"train": [], "test": []}
    while any(len(rows[split]) < count for split, count in wanted.items()):
        problem = draw(rng)
        split = "test" if is_held_out(problem.sql) else "train"
        if len(rows[split]) < wanted[split]:
            script = problem.script(fill(problem, rng))
            rows[split].append(_generated_row(f"{split}-{len(rows[split])}", split, problem, script, full))
    return cap(Splits(**rows), data)


def _generated_row(row_id: str, split: str, problem: Problem, script: str, full: bool) -> Row:
    question = problem.question
    return {
        "id": row_id,
        "prompt": full_prompt(question) if full else [{"role": "user", "content": question}],
        "ground_truth": {"sql": problem.sql, "script": script},
        "question": question,
        "source": "synthetic",
        "split": split,
        "key": problem.sql,
        "style": "full" if full else "short",
        "problem": asdict(problem),
    }


def _folder(path: str) -> Path | None:
    local = Path(path).expanduser()
    return local if local.is_dir() else local.parent if local.is_file() else None


def _loaded_row(
    raw: dict[str, Any], split: str, index: int, db_path: str | None, beside: Path | None, example: bool
) -> Row:
    row = to_row(raw, split, index)
    simple = raw.get("db") or not raw.get("db_id")
    file = _simple_database(raw, row["id"], db_path, beside) if simple else _skyrl_database(raw, row["id"], db_path)
    if not file.is_file():
        raise UserError(
            f"row {row['id']}: database {file} does not exist; correct the row or environment.config.db_path"
        )
    row["ground_truth"] = {"sql": _gold_sql(raw, row), "db": str(file.resolve())}
    if not raw.get("prompt"):  # Parquet and CSV give a row without a prompt an empty one if others have a prompt
        row["prompt"] = full_prompt(raw["question"], schema_of(file), raw.get("evidence") or "", example)
    return row


def _gold_sql(raw: dict[str, Any], row: Row) -> str:
    truth = row["ground_truth"]
    named = (*(raw.get(name) for name in ("sql", "query", "SQL")), truth.get("sql"), truth.get("answer"))
    # In Spider's own files `sql` is the parse tree of `query`.
    sql = next((value for value in named if isinstance(value, str) and value.strip()), None)
    if sql is None:
        raise UserError(f"row {row['id']} has no gold query; add a column sql, query or reward_spec.ground_truth")
    return sql


def _skyrl_database(raw: dict[str, Any], row_id: str, db_path: str | None) -> Path:
    layout = LAYOUTS.get(raw.get("data"))
    if layout is None:
        raise UserError(f"row {row_id} has data={raw.get('data')!r}; with db_id it must be one of {', '.join(LAYOUTS)}")
    if not db_path:
        raise UserError(
            f"row {row_id} has db_id={raw['db_id']!r}; set environment.config.db_path to the databases' folder"
        )
    return Path(db_path).expanduser() / layout.format(id=raw["db_id"])


def _simple_database(raw: dict[str, Any], row_id: str, db_path: str | None, beside: Path | None) -> Path:
    name = raw.get("db")
    if not isinstance(name, str) or not name:
        raise UserError(
            f"row {row_id} has db={name!r}; write the path of its SQLite file, or db_id and data as SkyRL does"
        )
    root = Path(db_path).expanduser() if db_path else beside
    return root / name if root else Path(name).expanduser()


@lru_cache(maxsize=256)
def schema_of(file: Path) -> str:
    """Return the CREATE statements of a database's tables and views, as many as fit, and the names of the others."""
    with closing(SqlSandbox.from_path(file)) as sandbox:
        result = sandbox.run(_SHOW_SCHEMA)
    if result.error:
        raise UserError(f"database {file} cannot be read ({result.error}); repair it, or correct the row's path")
    statements = {name: sql or name for name, sql in result.rows}
    names = list(statements)
    shown = names[: _fitting([len(sql) + 2 for sql in statements.values()], SCHEMA_CHARACTERS)]
    text = ";\n".join(statements[name] for name in shown)
    if left_out := names[len(shown) :]:
        others = ", ".join(left_out[: _fitting([len(name) + 2 for name in left_out], SCHEMA_CHARACTERS)])
        text += f";\n-- {len(left_out)} others: {others}. select sql from sqlite_master where name = '...' shows one"
    return text


def _fitting(sizes: list[int], most: int) -> int:
    """Return the number of leading sizes whose sum is at most `most`."""
    return sum(total <= most for total in accumulate(sizes))
