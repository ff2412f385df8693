"""One episode of a question about a database."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, ClassVar

from envs.text_to_sql.prompts import harmless, style_of
from envs.text_to_sql.reward import SCHEMES, EpisodeReward, judge
from mtrl.environments.base import BaseEnvironment, StepResult
from mtrl.environments.config_values import check_count, check_positive
from mtrl.errors import UserError
from mtrl.sandbox.sql import QueryLimits, SqlSandbox
from mtrl.types import Message, Row

_TAG = re.compile(r"</?(?:sql|solution)>")
_ACTION = re.compile(r"<(sql|solution)>(.*?)</\1>", re.DOTALL)
_FENCE = re.compile(r"```(?:(?:sqlite|sql)\s)?(.*)```", re.DOTALL | re.IGNORECASE)


def parse_action(response: str) -> tuple[str, str] | None:
    """Return `("sql" or "solution", query)` if the response, without its thinking, holds exactly one of them; else
    None."""
    visible = response.rpartition("</think>")[2]
    if len(_TAG.findall(visible)) != 2:  # first, because the search takes quadratic time with many tags
        return None
    action = _ACTION.search(visible)
    if action is None:
        return None
    query = action[2].strip()
    fenced = _FENCE.fullmatch(query)
    query = fenced[1].strip() if fenced else query
    return (action[1], query) if query else None


class TextToSqlEnv(BaseEnvironment):
    """In each turn the model runs one `<sql>query</sql>` and observes the result, or ends with a
    `<solution>query</solution>`.

    Every episode has its own database, in memory and read-only. Queries have no reward of their own.
    """

    reward_schemes: ClassVar[tuple[str, ...]] = SCHEMES

    def __init__(
        self,
        max_turns: int = 5,
        reward: str = "default",
        query_operations: int = QueryLimits.operations,
        query_seconds: float = QueryLimits.seconds,
        observation_rows: int | None = None,
        observation_characters: int | None = None,
        **config: Any,
    ):
        super().__init__(max_turns)  # the other keys of environment.config are for the loader
        if max_turns < 1:
            raise UserError(f"generator.max_turns={max_turns} leaves no turn to answer; set it to 1 or more")
        sizes = {"rows": observation_rows, "characters": observation_characters}
        self.sizes = {name: value for name, value in sizes.items() if value is not None}
        check_positive("query_seconds", query_seconds)
        check_count("query_operations", query_operations)
        for name, value in self.sizes.items():
            check_count(f"observation_{name}", value)
        self.limits = QueryLimits(operations=query_operations, seconds=query_seconds)
        self.scheme = reward
        self._sandbox: SqlSandbox | None = None
        self.reset()

    def reset(self, row: Row | None = None) -> list[Message] | None:
        super().reset(row)
        self.close()
        self.reward = EpisodeReward(self.scheme)
        self.style = replace(style_of(row), **self.sizes)
        return None

    def step(self, response: str, ground_truth: dict[str, Any]) -> StepResult:
        self.current_turn += 1
        action = parse_action(response)
        if action is None:
            return self._result(response, None, self.style.malformed, malformed=1.0)
        kind, query = action
        if kind == "solution":
            verdict = judge(self._database(ground_truth), query, _gold_sql(ground_truth))
            return self._result(response, kind, "", verdict.correct, executed=float(verdict.executed))
        return self._explore(response, query, ground_truth)

    def close(self) -> None:
        if self._sandbox is not None:
            self._sandbox.close()
            self._sandbox = None

    def _explore(self, response: str, query: str, ground_truth: dict[str, Any]) -> StepResult:
        result = self._database(ground_truth).run(query, rows=self.style.rows)
        text = f"error: {result.error}" if result.error else self.style.table(result)
        return self._result(response, "sql", harmless(text), queries=1.0, query_errors=float(result.error is not None))

    def _result(
        self, response: str, kind: str | None, text: str, correct: bool = False, **metrics: float
    ) -> StepResult:
        turns_left = self.max_turns - self.current_turn
        done = kind == "solution" or turns_left <= 0
        components = self.reward.components(response, kind, correct, done)
        return StepResult(
            reward=sum(components.values()),
            observation=None if done else self.style.observation(text, turns_left),
            done=done,
            truncated=done and kind != "solution",
            components=components,
            # These are not part of the reward: a reward for a query that runs would reward any query.
            metrics={"queries": 0.0, "query_errors": 0.0, "executed": 0.0, "malformed": 0.0, **metrics},
        )

    def _database(self, ground_truth: dict[str, Any]) -> SqlSandbox:
        if self._sandbox is None:
            self._sandbox = open_database(ground_truth, self.limits)
        return self._sandbox


def open_database(ground_truth: dict[str, Any], limits: QueryLimits) -> SqlSandbox:
    """Open the database of a row, which `ground_truth.script` creates, or whose file is `ground_truth.db`."""
    if "script" in ground_truth:
        return SqlSandbox.from_script(ground_truth["script"], limits)
    if "db" in ground_truth:
        return SqlSandbox.from_path(ground_truth["db"], limits)
    raise UserError(f"ground_truth has the keys {sorted(ground_truth)}; for text_to_sql it needs db (a file) or script")


def _gold_sql(ground_truth: dict[str, Any]) -> str:
    sql = ground_truth.get("sql")
    if not isinstance(sql, str) or not sql.strip():
        raise UserError(f"ground_truth.sql={sql!r} is no query; write the SQL that answers the question")
    return sql
