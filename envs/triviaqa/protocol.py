"""The strict parser of a turn's action."""

from __future__ import annotations

import re
from dataclasses import dataclass

_TAG = re.compile(r"</?(?:tool|answer|result)>")
_ACTION = re.compile(r"<(tool|answer)>(.*?)</\1>", re.DOTALL)
_ALL_TAGS = re.compile(r"</?(?:reasoning|tool|answer|result)>")


@dataclass(frozen=True)
class Action:
    """A tool call or an answer."""

    kind: str
    """Kind of action: tool or answer."""
    text: str
    """Content of the action's tag."""


def parse_action(response: str) -> Action | None:
    """Return the only `<tool>…</tool>` or `<answer>…</answer>` of a response, if it comes after the reasoning; else
    None.

    Text before `</think>` is ignored. A response with two actions is invalid, wherever they are.
    """
    visible = response.rpartition("</think>")[2]
    if len(_TAG.findall(visible)) != 2:  # first, because the search below would be slow on many tags
        return None
    action = _ACTION.search(visible.rpartition("</reasoning>")[2])
    return Action(action[1], action[2].strip()) if action and action[2].strip() else None


def reasons(response: str) -> bool:
    """Whether the response holds a closed, non-empty `<reasoning>`."""
    thought, closed, _ = response.rpartition("</think>")[2].partition("<reasoning>")[2].partition("</reasoning>")
    return bool(closed and thought.strip())


def without_tags(text: str) -> str:
    """Return a tool's result without tags that could end the result or form an action."""
    return _ALL_TAGS.sub(" ", text)  # a space, so that the text around a tag forms no new tag
