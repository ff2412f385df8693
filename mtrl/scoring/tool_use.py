"""Statistics of tool calls: names, counts and errors. The tools need not be known."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from mtrl.types import Message, Trajectory, Turn

NAMES = 20
"""Maximum number of names that are counted separately, because a model can invent any number of names."""
OTHERS = "(others)"
MALFORMED = "(malformed)"
NO_TOOLS = frozenset(
    {"think", "reasoning", "answer", "solution", "final_output", "information", "observation", "result"}
)
"""Tags of a response that are not calls: thoughts, answers, and imitations of the environment's messages."""
LONGEST = 50_000
"""Maximum number of characters, from the end of a response, that are searched."""

_TAG = re.compile(r"<(/?)([A-Za-z_][A-Za-z0-9_-]{0,39})>")
_BLOCK = re.compile(r"^```(?:mswea_)?(bash|sh|shell|python)(?:_command)?[ \t\r]*$", re.MULTILINE)
_ERROR = re.compile(r"(?:^|>)\s*error\b", re.IGNORECASE | re.MULTILINE)
_ERROR_COUNTS = ("_errors", "failed_commands")
"""Suffixes of the names of turn metrics that count failed calls."""


@dataclass(frozen=True)
class ToolUse:
    """Calls of one tool over all episodes."""

    name: str
    calls: int
    errors: int
    calls_per_episode: float
    episodes: float
    """Share of the episodes that called it."""


def tool_use(trajectories: Iterable[Trajectory]) -> list[ToolUse]:
    """Return the tools, sorted by descending number of calls.

    Calls are the `tool_calls` of messages. In messages without `tool_calls`, they are the elements `<name>…</name>` and
    the blocks of shell or Python in the text. An element whose content is JSON with a `name` counts under that name. A
    call is an error if it is malformed, or if its reply reports an error.
    """
    calls, errors = Counter[str](), Counter[str]()
    used: list[set[str]] = []
    for trajectory in trajectories:
        made = list(_calls_of(trajectory))
        calls.update(name for name, _ in made)
        errors.update(name for name, wrong in made if wrong)
        used.append({name for name, _ in made})
    users, episodes = Counter(name for names in used for name in names), len(used)
    shown = [name for name, _ in sorted(calls.items(), key=lambda item: (-item[1], item[0]))]
    rows = [
        ToolUse(name, calls[name], errors[name], calls[name] / episodes, users[name] / episodes)
        for name in shown[:NAMES]
    ]
    if rest := set(shown[NAMES:]):
        total, wrong = sum(calls[name] for name in rest), sum(errors[name] for name in rest)
        share = sum(not rest.isdisjoint(names) for names in used) / episodes
        rows.append(ToolUse(OTHERS, total, wrong, total / episodes, share))
    return rows


def _calls_of(trajectory: Trajectory) -> Iterable[tuple[str, bool]]:
    """Yield the name of every call, and whether it is an error."""
    turns = trajectory.environment_turns
    replies = [turn.observation for turn in turns[1:]] + [trajectory.final_observation]
    for turn, reply in zip(turns, replies, strict=False):
        if turn.message.get("tool_calls"):
            yield from _message_calls(turn.message["tool_calls"], reply)
        else:
            yield from _text_calls(turn, reply)


def _message_calls(calls: list[dict[str, Any]], reply: list[Message]) -> Iterable[tuple[str, bool]]:
    results = [message for message in reply if message.get("role") == "tool"]
    by_id = {message["tool_call_id"]: message for message in results if message.get("tool_call_id") is not None}
    for place, call in enumerate(calls):
        # Without ids, a server answers calls in their order.
        in_order = {} if by_id or place >= len(results) else results[place]
        answer = by_id.get(call.get("id"), in_order)
        name = answer.get("name") or (call.get("function") or {}).get("name")
        content = answer.get("content")
        wrong = "malformed" in call or (isinstance(content, str) and content.startswith("Error"))
        yield str(name or MALFORMED)[:64], wrong


def _text_calls(turn: Turn, reply: list[Message]) -> list[tuple[str, bool]]:
    answer = turn.text[-LONGEST:].rpartition("</think>")[2]
    names = [name for name in _elements(answer) if name not in NO_TOOLS]
    names += [block[1] for block in _BLOCK.finditer(answer)]
    wrong = _went_wrong(turn, reply)
    return [(name, wrong and place == len(names) - 1) for place, name in enumerate(names)]


def _elements(text: str) -> Iterable[str]:
    """Yield the names of the elements that contain no other element."""
    for opening, closing in pairwise(_TAG.finditer(text)):
        if not opening[1] and closing[1] and opening[2] == closing[2]:
            yield _named_inside(text[opening.end() : closing.start()]) or opening[2]


def _named_inside(body: str) -> str | None:
    """Return the name in the JSON of a call, if there is one."""
    if not body.lstrip().startswith("{") or len(body) > 10_000:
        return None
    try:
        name = json.loads(body).get("name")
    except (ValueError, RecursionError):
        return None
    return name[:64] if isinstance(name, str) and name else None


def _went_wrong(turn: Turn, reply: list[Message]) -> bool:
    counts = [value for name, value in turn.metrics.items() if name.endswith(_ERROR_COUNTS)]
    if counts:
        return any(counts)
    texts = (message.get("content") for message in reply)
    return any(isinstance(text, str) and _ERROR.search(text[:2000]) is not None for text in texts)
