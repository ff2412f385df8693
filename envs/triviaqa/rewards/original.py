"""The six rewards of MT-GRPO with their published weights: turn rewards up to 0.7, outcome rewards up to 1.9.

Source: arXiv 2505.11821, and its code (https://github.com/SiliangZeng/Multi-Turn-RL-Agent, TrivialQAToolRubric and
XMLParser). The functions take a batch of conversations (the messages after the prompt) and the accepted answers of each
conversation, and return a number for each. They are included for comparison, with their exploits; `default.py` avoids
these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from mtrl.types import Message

FIELDS = (("reasoning",), ("tool", "answer"))
"""Alternative tags of each field; a message holds one tag of each field."""
TAGS = tuple(tag for field in FIELDS for tag in field)


def tag_content(tag: str, text: str) -> str | None:
    """Return the content of the first such tag in a text; None if there is none."""
    inside, closed, _ = text.partition(f"<{tag}>")[2].partition(f"</{tag}>")
    return inside.strip() if closed else None


def responses(conversation: Sequence[Message]) -> list[str]:
    """Return the contents of the assistant's messages."""
    return [message["content"] for message in conversation if message["role"] == "assistant"]


def results(conversation: Sequence[Message]) -> list[str | None]:
    """Return the result of each tool call with a reply; None if the reply holds no result."""
    calls = [
        following["content"]
        for message, following in pairwise(conversation)
        if message["role"] == "assistant" and tag_content("tool", message["content"]) is not None
        if following["role"] == "user"
    ]
    return [tag_content("result", reply) for reply in calls]


def last_answer(conversation: Sequence[Message]) -> str | None:
    """Return the content of the `<answer>` in the last message that has one; of several in one message, the first."""
    return next(
        (answer for text in reversed(responses(conversation)) if (answer := tag_content("answer", text)) is not None),
        None,
    )


def tool_execution(completions: Sequence[Sequence[Message]], **_: object) -> list[float]:
    """Return 0.2 x the share of calls without an error."""
    return [0.2 * executed(results(conversation)) for conversation in completions]


def search_hit(completions: Sequence[Sequence[Message]], answer: Sequence[Sequence[str]], **_: object) -> list[float]:
    """Return 0.5 if an accepted answer is part of the first result."""
    return [0.5 * in_first(results(c), answers) for c, answers in zip(completions, answer, strict=True)]


def exist_answer(completions: Sequence[Sequence[Message]], answer: Sequence[Sequence[str]], **_: object) -> list[float]:
    """Return 0.5 if an accepted answer is part of the last answer."""
    return [0.5 * _part_of(last_answer(c), answers) for c, answers in zip(completions, answer, strict=True)]


def exact_match(completions: Sequence[Sequence[Message]], answer: Sequence[Sequence[str]], **_: object) -> list[float]:
    """Return 1.0 if the last answer is an accepted answer, up to case and surrounding space."""

    def same(conversation: Sequence[Message], answers: Sequence[str]) -> bool:
        last = last_answer(conversation)
        return last is not None and last.lower().strip() in {each.lower().strip() for each in answers}

    return [float(same(c, answers)) for c, answers in zip(completions, answer, strict=True)]


def format_reward(completions: Sequence[Sequence[Message]], **_: object) -> list[float]:
    """Return 0.2 x the mean over messages of (0.4 x share of fields + 0.2 + 0.2 for a right start + 0.2 for a right
    end)."""
    return [0.2 * mean_over_messages(conversation, form) for conversation in completions]


def xml(completions: Sequence[Sequence[Message]], **_: object) -> list[float]:
    """Return 0.2 x the mean over messages of the share of tags that are opened and closed exactly once, at least 0."""
    return [max(0.0, 0.2 * mean_over_messages(conversation, tidiness)) for conversation in completions]


def executed(given: Sequence[str | None]) -> float:
    """Return the share of results that exist and are no errors."""
    good = sum(result is not None and not result.startswith("Error:") for result in given)
    return good / len(given) if given else 0.0


def in_first(given: Sequence[str | None], answers: Sequence[str]) -> bool:
    """Whether the first existing result contains an accepted answer."""
    return _part_of(next((result for result in given if result is not None), None), answers)


def mean_over_messages(conversation: Sequence[Message], rule: Callable[[str], float]) -> float:
    values = [rule(text) for text in responses(conversation)]
    return sum(values) / len(values) if values else 0.0


def form(text: str) -> float:
    """Return the format score of a message, from 0.0 to 1.0."""
    filled = any(tag_content(tag, text) is not None for tag in TAGS)
    named = [any(f"<{tag}>" in text or f"</{tag}>" in text for tag in field) for field in FIELDS]
    score = 0.4 * (sum(named) / len(FIELDS)) if filled else 0.0
    score += 0.2  # for "spacing": the published check compares a pattern with itself, so every text passes
    return score + 0.2 * begins(text) + 0.2 * ends(text)


def begins(text: str) -> bool:
    return text.strip().startswith("<reasoning>")


def ends(text: str) -> bool:
    return text.strip().endswith(("</tool>", "</answer>"))


def tidiness(text: str) -> float:
    """Return the tag score of a message, at most 1.0; many superfluous tags make it negative."""
    used = [tag for tag in TAGS if f"<{tag}>" in text or f"</{tag}>" in text]
    marks = [mark for tag in used for mark in (f"<{tag}>", f"</{tag}>")]
    return sum(1 - abs(text.count(mark) - 1) for mark in marks) / len(marks) if marks else 0.0


def _part_of(text: str | None, answers: Sequence[str]) -> bool:
    return text is not None and any(each.lower() in text.lower() for each in answers)


TURN_REWARD_FUNCS = [tool_execution, search_hit]
OUTCOME_REWARD_FUNCS = [exist_answer, exact_match, format_reward, xml]
