"""The scorer, independent of the reward: it carries out the calls of the trajectory by rules of its own, and compares
the result with the row. This module shares no code with the environment, its tools or its reward."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from mtrl.types import Message, Row, Trajectory

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_CODE = re.compile(r"(?<!\w)[A-Z][0-9]{3}(?!\w)")
_PARAMETERS = {
    "cancel_order": {"order_id"},
    "refund_order": {"order_id"},
    "change_address": {"order_id", "address"},
    "refuse_request": {"order_id", "reason"},
}
"""Parameters of the tools that change an order."""
_REASONS = {"sent", "early", "late", "identity"}
_END = "end_conversation"
_MOST_CALLS = 8
"""Maximum number of calls that the environment runs in one turn."""
_LONGEST = 2000
"""Maximum length of the agent's words in one turn, in characters."""


def score(trajectory: Trajectory, row: Row) -> float:
    """Return 1.0 if the agent ended the conversation, every order is in the right state, each required code was told,
    and no other one; else 0.0."""
    return float(answered(trajectory, row) and _state_is_right(trajectory, row) and _told_is_right(trajectory, row))


def answered(trajectory: Trajectory, row: Row) -> bool:
    """Whether the agent ended the conversation by its last turn."""
    responses = _responses(trajectory)
    return bool(responses) and any(call == (_END, {}) for call in _calls(responses[-1]))


def measure(trajectory: Trajectory, row: Row) -> dict[str, float]:
    """Return `format` (the agent ended the conversation), `state` (every order is in the right state) and `told` (the
    customer heard the right codes); each is 1.0 or 0.0."""
    return {
        "format": float(answered(trajectory, row)),
        "state": float(_state_is_right(trajectory, row)),
        "told": float(_told_is_right(trajectory, row)),
    }


def _state_is_right(trajectory: Trajectory, row: Row) -> bool:
    wanted = row["ground_truth"]["orders"]
    orders = {
        number: {name: order[name] for name in ("address", "cancelled", "refunded", "refused")}
        for number, order in row["orders"].items()
    }
    for name, arguments in _made(trajectory):
        if name not in _PARAMETERS or not _fits(arguments, _PARAMETERS[name]) or arguments["order_id"] not in orders:
            continue
        order = orders[arguments["order_id"]]
        if name == "refuse_request":
            if arguments["reason"] in _REASONS:
                order["refused"] = sorted({*order["refused"], arguments["reason"]})
        elif name == "change_address":
            order["address"] = arguments["address"]
        else:
            order["cancelled" if name == "cancel_order" else "refunded"] = True
    return orders == wanted


def _told_is_right(trajectory: Trajectory, row: Row) -> bool:
    truth = row["ground_truth"]
    named = {code for text in _speeches(trajectory) for code in _CODE.findall(text)}
    return set(truth["told"]) <= named and not named - set(truth["told"]) - set(truth["tellable"])


def _fits(arguments: dict[str, Any], parameters: set[str]) -> bool:
    return arguments.keys() == parameters and all(type(value) is str for value in arguments.values())


def _made(trajectory: Trajectory) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the readable calls before the end of the conversation, in order."""
    for message in _responses(trajectory):
        for call in _calls(message):
            if call == (_END, {}):
                return
            if call is not None:
                yield call


def _speeches(trajectory: Trajectory) -> list[str]:
    """Return the agent's words: the texts without calls, without thoughts."""
    texts = [str(message.get("content") or "") for message in _responses(trajectory) if not _calls(message)]
    return [text.split("</think>")[-1].split("<think>")[0].strip()[:_LONGEST] for text in texts]


def _responses(trajectory: Trajectory) -> list[Message]:
    return [message for message in trajectory.messages if message.get("role") == "assistant"]


def _calls(message: Message) -> list[tuple[str, dict[str, Any]] | None]:
    """Return the calls of a response that the environment runs; None stands for a call that cannot be read."""
    content = message.get("content")
    if message.get("tool_calls"):
        found = [_parsed(call) for call in message["tool_calls"]]
    elif isinstance(content, str) and re.search("</?tool_call>", content):
        found = _written(content)
    else:
        found = []
    return found[:_MOST_CALLS]


def _parsed(call: dict[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """Return a call that the renderer has parsed."""
    function = call.get("function") or {}
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = _object(arguments)
    return None if call.get("malformed") or not isinstance(arguments, dict) else (str(function.get("name")), arguments)


def _written(content: str) -> list[tuple[str, dict[str, Any]] | None]:
    """Return the calls in the text form; a call that is not closed, or never opened, cannot be read."""
    calls: list[tuple[str, dict[str, Any]] | None] = []
    for body in _CALL.findall(content):
        value = _object(body)
        readable = value is not None and value.keys() == {"name", "arguments"} and isinstance(value["arguments"], dict)
        calls.append((str(value["name"]), value["arguments"]) if value is not None and readable else None)
    return [*calls, None] if re.search("</?tool_call>", _CALL.sub("", content)) else calls


def _object(text: str) -> dict[str, Any] | None:
    """Return a JSON object; None for any other text, or for a key that occurs twice."""
    try:
        value = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError
    return value
