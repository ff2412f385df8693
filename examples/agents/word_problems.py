"""The task of the agents with a calculator: synthetic word problems and the scorer of `envs/gsm8k`.

The agents have their own tools and reward. The environment here runs the same task natively: the tiny policy's warm
start learns the form of tool calls from it, and without `generator.agent` training uses this environment.
"""

from __future__ import annotations

import random
import re
from typing import Any

from envs.gsm8k.data import decoys, load, worked_example
from envs.gsm8k.demonstrator import WeakPlayer
from envs.gsm8k.prompts import QUESTION
from envs.gsm8k.scorer import measure, score
from examples.agents import openai_tools
from mtrl.datasets import Splits
from mtrl.environments.family import Family
from mtrl.environments.tool_calls import format_call
from mtrl.environments.tools import ToolEnvironment, ToolError, tool
from mtrl.environments.worked_example import Line, calling, with_example
from mtrl.types import Row

SYSTEM = """You solve word problems. Call the tool calculate for every calculation. Then end with a message that holds \
the answer: a last line of four number signs and the number, such as #### 72. Write #### nowhere else, and no unit \
after the number."""
EXAMPLE: list[Line] = [
    ("User", QUESTION),
    calling("calculate", {"expression": "3 * 12 - 5"}),
    ("Tool", "31"),
    ("Assistant", "She has 31 pens left.\n#### 31"),
]
CALL_OPENS, CALL_CLOSES = format_call("calculate", {"expression": "|"}).split("|")


class WordProblems(ToolEnvironment):
    """A turn that calls the calculator receives the value; a turn without calls is the answer."""

    @tool
    def calculate(self, expression: str) -> str:
        """The value of an expression of numbers, + - * / and parentheses."""
        try:
            return openai_tools.calculate(expression)
        except (ValueError, ArithmeticError, RecursionError) as error:
            raise ToolError(str(error)) from error

    def answer(self, response: str, ground_truth: dict[str, Any]) -> tuple[float, None, bool]:
        return openai_tools.reward(response, ground_truth["answer"]), None, True


class Caller:
    """gsm8k's weak demonstrator, with tool calls of `calculate`."""

    def __init__(self, player: WeakPlayer):
        self.player = player

    def act(self, observation: str | None) -> str:
        """Return the next response."""
        response = self.player.act(observation)
        computes = re.fullmatch("<calc>(.*)</calc>", response)
        return format_call("calculate", {"expression": computes[1]}) if computes else response


def load_rows(data: Any, seed: int, operations: int = 2, prompt: str = "short") -> Splits:
    """Return generated problems, or those of `data.path`. A full prompt describes the agent's tool."""
    splits = load(data, seed, calculator=True, operations=operations)
    if prompt == "full":
        system = {"role": "system", "content": with_example(SYSTEM, EXAMPLE)}
        for row in (*splits.train, *splits.test):
            row["prompt"] = [system, {"role": "user", "content": row["question"]}]
    return splits


def demonstrate(row: Row, rng: random.Random) -> Caller:
    """Return a weak demonstrator for `row`, which must be a training row."""
    if row.get("split") == "test":
        raise ValueError(f"row {row['id']} is held out and must not be demonstrated")
    return Caller(WeakPlayer(row, rng))


def gold(row: Row) -> list[str]:
    """Return the responses of a perfect player."""
    calls = [format_call("calculate", {"expression": row["expression"]})] if "expression" in row else []
    return [*calls, f"#### {row['ground_truth']['answer']}"]


FAMILY = Family(
    name="word_problems",
    environment=WordProblems,
    load=load_rows,
    score=score,
    demonstrate=demonstrate,
    gold=gold,
    decoys=decoys,
    worked_example=worked_example,
    measure=measure,
    config_keys=("operations",),
    tokens=(CALL_OPENS, CALL_CLOSES, "#### "),
)
