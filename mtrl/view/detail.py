"""One trajectory in detail: turns, messages, and every token with its data."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import groupby
from statistics import fmean
from typing import Any

from mtrl.record.tokens import Tokenizer
from mtrl.types import Trajectory, Turn, images_in, trajectory_from_dict
from mtrl.utils.images import JPEG, PNG, SHOWN

LONGEST_RAW = 20_000
"""Maximum number of characters shown of an unreadable line."""
TRAINED_KINDS = ("train", "disagree")

Json = dict[str, Any]


class UnreadableLine(ValueError):
    """A line that is not a trajectory."""


def parse(line: bytes) -> Trajectory:
    """Parse a line into a trajectory, and check the types of its values.

    Raises:
        Unreadable: The line is not a trajectory of mtrl.
    """
    try:
        trajectory = trajectory_from_dict(json.loads(line))
        if not isinstance(trajectory.final_observation, list) or not isinstance(trajectory.metrics, dict):
            raise TypeError("it has no final observation or metrics")
        if not isinstance(trajectory.error, str | None):
            raise TypeError("its error is no text")
        for turn in trajectory.turns:
            _check(turn)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
        raise UnreadableLine(f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')[:500]}") from error
    return trajectory


def _check(turn: Turn) -> None:
    """Check the types of a turn, because a line may be JSON with the right keys and values of any type."""
    expected = {
        **dict.fromkeys(("observation_ids", "action_ids", "action_logprobs", "version_spans", "observation"), list),
        **dict.fromkeys(("advantages", "trainer_logprobs"), list),
        **{"text": str, "components": dict, "metrics": dict, "break_reason": str | None, "is_summary": bool},
    }
    for name, kind in expected.items():
        if not isinstance(getattr(turn, name), kind):
            raise TypeError(f"a turn has another {name}")
    _whole_numbers([*turn.observation_ids, *turn.action_ids, *(n for span in turn.version_spans for n in span)])
    _numbers([turn.reward, turn.seconds_generate, turn.seconds_environment])
    _numbers([*turn.action_logprobs, *turn.trainer_logprobs, *turn.advantages])
    tokens = len(turn.action_ids)
    if any(len(values) not in (0, tokens) for values in (turn.action_logprobs, turn.trainer_logprobs)):
        raise ValueError("log-probs and ids are not of one length")
    if len(turn.advantages) not in (0, 1, tokens):
        raise ValueError("advantages and ids are not of one length")
    if any(len(span) != 2 or span[1] < 0 for span in turn.version_spans):
        raise ValueError("a span of versions is no pair")
    if sum(count for _, count in turn.version_spans) != tokens:
        raise ValueError("versions and ids are not of one length")


def _whole_numbers(values: Sequence[Any]) -> None:
    if not {type(value) for value in values} <= {int}:
        raise TypeError("an id is no whole number")


def _numbers(values: Sequence[Any]) -> None:
    if not {type(value) for value in values} <= {int, float}:
        raise TypeError("a reward, log-prob, advantage or time is no number")
    for value in values:
        float(value)  # OverflowError: whole numbers in JSON have no limit


def turns_of(trajectory: Trajectory, kind: str, tokenizer: Tokenizer | None) -> list[Json]:
    """Return the TURNs of `mtrl/view/http_api.py`."""
    return [
        {
            "number": number,
            "observation": _observation(turn, tokenizer),
            "action": _action(turn, tokenizer),
            "reward": turn.reward,
            "components": turn.components,
            "metrics": turn.metrics,
            "advantage": _mean_advantage(turn),
            "finish": turn.finish,
            "cut": turn.finish == "length",
            "break": turn.break_reason,
            "summary": turn.is_summary,
            "parent": None if turn.parent is None else turn.parent + 1,
            "trained": untrained(turn, trajectory, kind) is None,
            "untrained": untrained(turn, trajectory, kind),
            "versions": turn.version_spans,
            "seconds_generate": turn.seconds_generate,
            "seconds_environment": turn.seconds_environment,
        }
        for number, turn in enumerate(trajectory.turns, 1)
    ]


def untrained(turn: Turn, trajectory: Trajectory, kind: str) -> str | None:
    """Return the reason why the actions of a turn were not trained on; None if they were."""
    if kind not in TRAINED_KINDS:
        return "evaluations are not trained on"
    if not trajectory.trainable:
        return "left out: a length limit cut the trajectory"
    if not turn.action_ids:
        return "nothing was sampled"
    if not turn.advantages:
        return "no advantage is recorded: its group was set aside, or the run is older"
    return None


def _mean_advantage(turn: Turn) -> float | None:
    return fmean(turn.advantages) if turn.advantages else None


def _observation(turn: Turn, tokenizer: Tokenizer | None) -> Json:
    messages = [message(each) for each in turn.observation]
    columns = _columns(turn.observation_ids, tokenizer)
    columns["by"] = (
        roles_of(columns["texts"], messages) if columns["texts"] is not None else [[columns["n"], "context"]]
    )
    return {"messages": messages, "tokens": _without_count(columns), "whole_context": turn.break_reason is not None}


def _action(turn: Turn, tokenizer: Tokenizer | None) -> Json:
    tokens = len(turn.action_ids)
    sampled, trainer = turn.action_logprobs or None, turn.trainer_logprobs or None
    columns = _columns(turn.action_ids, tokenizer)
    columns |= {
        "by": [[tokens, "policy"]],
        "logprobs": sampled,
        "trainer_logprobs": trainer,
        "drift": [a - b for a, b in zip(trainer, sampled, strict=True)] if trainer and sampled else None,
        "advantages": turn.advantages * tokens if len(turn.advantages) == 1 else turn.advantages or None,
    }
    return {"text": turn.text, "message": message(turn.message), "tokens": _without_count(columns)}


def _columns(ids: list[int], tokenizer: Tokenizer | None) -> Json:
    """Return TOKENS of `mtrl/view/http_api.py`. They are columns, because a trajectory can have 100,000 tokens."""
    pieces = tokenizer.pieces(ids) if tokenizer is not None else None
    return {
        "n": len(ids),
        "ids": ids,
        "texts": pieces.texts if pieces else None,
        "special": pieces.special if pieces else [],
        "continued": pieces.continued if pieces else [],
        "by": [],
        "logprobs": None,
        "trainer_logprobs": None,
        "drift": None,
        "advantages": None,
    }


def _without_count(columns: Json) -> Json:
    return {name: value for name, value in columns.items() if name != "n"}


def roles_of(texts: Sequence[str], messages: Sequence[Json]) -> list[list[Any]]:
    """Return the roles of the tokens as runs of [count, role]. Tokens that hold text of a message have its role, all
    others have the role "template"."""
    whole = "".join(texts)
    places: list[tuple[int, int, str]] = []
    start = 0
    for each in messages:
        content = each["content"].strip()
        found = whole.find(content, start) if content else -1
        if found >= 0:
            start = found + len(content)
            places.append((found, start, each["role"]))
    return [[len(list(run)), role] for role, run in groupby(_roles(texts, places))]


def _roles(texts: Sequence[str], places: Sequence[tuple[int, int, str]]) -> Iterator[str]:
    """Yield the role of each token. A token without text has the role of the previous token."""
    start, place, role = 0, 0, "template"
    for text in texts:
        end = start + len(text)
        while place < len(places) and places[place][1] <= start:
            place += 1
        if text:
            role = places[place][2] if place < len(places) and places[place][0] < end else "template"
        yield role
        start = end


def message(data: Any) -> Json:
    """Return MESSAGE of `mtrl/view/http_api.py`; `data` may have any type."""
    data = data if isinstance(data, dict) else {"role": "?", "content": data}
    calls = data.get("tool_calls")
    images = [image for image in images_in([data]) if image.startswith((PNG, JPEG))]
    reasoning = data.get("reasoning_content") or data.get("reasoning") or data.get("thinking")
    return {
        "role": str(data.get("role", "?")),
        "content": content_text(data.get("content")),
        "tool_calls": [_tool_call(call) for call in calls] if isinstance(calls, list) else [],
        "name": str(data["name"]) if data.get("name") is not None else None,
        "reasoning": content_text(reasoning) if reasoning else None,
        **({"images": images} if images else {}),
    }


def content_text(content: Any) -> str:
    """Return the content as text; parts of a list are joined by line breaks."""
    if content is None:
        return ""
    if isinstance(content, list):
        return "\n".join(map(_part_text, content))
    return content if isinstance(content, str) else _json(content)


def _part_text(part: Any) -> str:
    if isinstance(part, dict) and part.get("type") == "image":
        return SHOWN
    if isinstance(part, dict) and isinstance(part.get("text"), str):
        return str(part["text"])
    return part if isinstance(part, str) else _json(part)


def _tool_call(call: Any) -> Json:
    function = call.get("function", call) if isinstance(call, dict) else call
    if not isinstance(function, dict):
        return {"name": "?", "arguments": _json(call)}
    arguments = function.get("arguments", "")
    text = arguments if isinstance(arguments, str) else _json(arguments)
    return {"name": str(function.get("name", "?")), "arguments": text}


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)
