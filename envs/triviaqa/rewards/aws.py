"""The rewards of `original.py` with the `format` of AWS's copy, which counts tags instead of fields, and so can exceed
its cap.

Source: the reward file of AWS's sample for MT-GRPO on SageMaker (`rewards/triviaqa_reward.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

from envs.triviaqa.rewards import original
from envs.triviaqa.rewards.original import FIELDS, TAGS, begins, ends, mean_over_messages, tag_content
from mtrl.types import Message


def tool_execution(completions: Sequence[Sequence[Message]], **_: object) -> list[float]:
    """Return 0.2 x the share of calls without an error."""
    return [0.2 * original.executed(_results(conversation)) for conversation in completions]


def search_hit(completions: Sequence[Sequence[Message]], answer: Sequence[Sequence[str]], **_: object) -> list[float]:
    """Return 0.5 if an accepted answer is part of the first result."""
    return [0.5 * original.in_first(_results(c), answers) for c, answers in zip(completions, answer, strict=True)]


def format_reward(completions: Sequence[Sequence[Message]], **_: object) -> list[float]:
    """Return 0.2 x the mean over messages of (0.4 x tags / 2 + 0.3 for a right start + 0.3 for a right end): up to
    0.24."""
    return [0.2 * mean_over_messages(conversation, form) for conversation in completions]


def form(text: str) -> float:
    """Return the format score of a message, from 0.0 to 1.2."""
    filled = sum(bool(tag_content(tag, text)) for tag in TAGS)
    return 0.4 * filled / len(FIELDS) + 0.3 * begins(text) + 0.3 * ends(text)


def _results(conversation: Sequence[Message]) -> list[str | None]:
    """Return the results; unlike in `original.py`, an empty result counts as none."""
    return [result or None for result in original.results(conversation)]


TURN_REWARD_FUNCS = [tool_execution, search_hit]
OUTCOME_REWARD_FUNCS = [original.exist_answer, original.exact_match, format_reward, original.xml]
