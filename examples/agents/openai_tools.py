"""A tool-using agent on OpenAI's client: word problems with a calculator. The module does not depend on mtrl.

The agent runs as a callable, with one call per episode, or as a program, with one process per episode::

    mtrl train experiment=agent_word_problems
    mtrl train experiment=agent_word_problems generator.agent.target=null \
        generator.agent.command=[python,examples/agents/openai_tools.py]
"""

from __future__ import annotations

import ast
import json
import operator
import os
import re
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from pathlib import Path
from typing import Any

from openai import OpenAI

MOST_CALLS = 3
CALCULATE = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "The value of an expression of numbers, + - * / and parentheses.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}
_OPERATORS: dict[type, Callable[..., Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


def run(row: dict[str, Any], client: Any) -> float:
    """Run one episode for `generator.agent.target`, and return the reward of the agent's answer."""
    with client.openai() as openai:
        return reward(solve(openai, client.model, row["prompt"]), row["ground_truth"]["answer"])


def main() -> None:
    """Run one episode for `generator.agent.command`: read the task from a file, and write the reward to a file."""
    row = json.loads(Path(os.environ["MTRL_ROW"]).read_text(encoding="utf-8"))
    with OpenAI() as openai:  # OPENAI_BASE_URL and OPENAI_API_KEY belong to the trajectory
        answer = solve(openai, os.environ["MTRL_MODEL"], row["prompt"])
    value = reward(answer, row["ground_truth"]["answer"])
    Path(os.environ["MTRL_RESULT"]).write_text(json.dumps({"reward": value}), encoding="utf-8")


def solve(openai: OpenAI, model: str, prompt: list[dict[str, Any]]) -> str:
    """Run the agent's loop: call the model, run its tool calls, and repeat. The first message without calls is the
    answer."""
    messages: list[Any] = list(prompt)
    for _ in range(MOST_CALLS):
        reply = openai.chat.completions.create(model=model, messages=messages, tools=[CALCULATE])  # type: ignore[list-item]
        message = reply.choices[0].message
        if not message.tool_calls:
            return message.content or ""
        messages.append(message.model_dump(exclude_none=True))
        messages += [result(call.model_dump()) for call in message.tool_calls]
    return ""


def result(call: dict[str, Any]) -> dict[str, Any]:
    """Return the message that answers a tool call; a mistake of the model becomes an error message."""
    try:
        arguments = json.loads(call["function"]["arguments"])
        content = calculate(arguments["expression"])
    except (ValueError, ArithmeticError, KeyError, TypeError, RecursionError) as error:
        content = f"Error: {error}"
    return {"role": "tool", "tool_call_id": call["id"], "content": content}


def calculate(expression: str) -> str:
    """Return the value of `expression` as text: integers exactly, other numbers with ten digits.

    Raises:
        ValueError: the expression is too long, or not arithmetic.
        ZeroDivisionError: the expression divides by zero.
    """
    if len(expression) > 100:
        raise ValueError("expression too long")
    try:
        tree = ast.parse(expression.strip(), mode="eval").body
    except (SyntaxError, MemoryError):
        raise ValueError("not an expression") from None
    value = _value(tree)
    return str(value) if value.denominator == 1 else f"{float(value):.10g}"


def reward(answer: str, truth: str) -> float:
    """Return 1.0 if the answer ends with `#### number`, has no other `####`, and the number is right; else 0.0."""
    found = re.fullmatch(r"[^#]*#### *(-?[0-9]{1,30}(?:\.[0-9]{1,30})?)\.?\s*", answer)
    try:
        return float(found is not None and Decimal(found[1]) == Decimal(truth.replace(",", "")))
    except InvalidOperation:
        return 0.0


def _value(node: ast.AST) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return Fraction(str(number))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value(left), _value(right))
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value(operand))
    raise ValueError("numbers, + - * / and parentheses only")


if __name__ == "__main__":
    main()
