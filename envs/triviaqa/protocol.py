"""What a turn does, read strictly."""

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
    """tool or answer"""
    text: str
    """What its tag holds."""


def parse_action(response: str) -> Action | None:
    """The only `<tool>…</tool>` or `<answer>…</answer>` of a response, if it comes after the reasoning; else None.

    What stands before `</think>` is not read. Two actions in one response are none, wherever they stand.
    """
    said = response.rpartition("</think>")[2]
    if len(_TAG.findall(said)) != 2:  # first, because the search below would be slow on many tags
        return None
    action = _ACTION.search(said.rpartition("</reasoning>")[2])
    return Action(action[1], action[2].strip()) if action and action[2].strip() else None


def reasons(response: str) -> bool:
    """Whether `<reasoning>` with something in it is closed before the action."""
    thought, closed, _ = response.rpartition("</think>")[2].partition("<reasoning>")[2].partition("</reasoning>")
    return bool(closed and thought.strip())


def without_tags(text: str) -> str:
    """A tool's result without what could pass for the end of it, or for an action."""
    return _ALL_TAGS.sub(" ", text)  # a blank, so that what stood around a tag makes no new one
