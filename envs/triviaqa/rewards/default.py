"""A reward of 1.0 for the answer; searches receive the turn rewards of MT-GRPO in advance, which the end of the episode
subtracts again.

An episode receives 1.0 in total with an accepted answer and 0.0 without one, independent of its searches, so that no
policy can profit from searches alone. A search that finds the answer is still rewarded in its own turn: the two turn
rewards are a potential that is 0 at the end of an episode, and such a shaping does not change the optimal policy (Ng,
Harada and Russell 1999).

Turns are parsed strictly, as in the environment; `<think>…</think>` is ignored. A result contains an accepted answer
only as whole words: `It` is not in `with`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import pairwise

from envs.triviaqa.protocol import parse_action
from envs.triviaqa.rewards import original
from mtrl.types import Message

SCALE = 1 / 2.6
"""Factor of the turn rewards: the published rewards add up to 2.6, and these to 1.0."""
_WORD = re.compile(r"\w+")

Conversations = Sequence[Sequence[Message]]
Answers = Sequence[Sequence[str]]


def tool_execution(completions: Conversations, **_: object) -> list[float]:
    """Return 0.2 / 2.6 x the share of calls without an error."""
    return [0.2 * SCALE * original.executed(_results(conversation)) for conversation in completions]


def search_hit(completions: Conversations, answer: Answers, **_: object) -> list[float]:
    """Return 0.5 / 2.6 if an accepted answer is in a result."""

    def found(conversation: Sequence[Message], answers: Sequence[str]) -> bool:
        read = [_words(result) for result in _results(conversation) if not result.startswith("Error:")]
        wanted = [words for each in answers if (words := _words(each))]
        return any(_place(words, result) is not None for words in wanted for result in read)

    return [0.5 * SCALE * found(c, answers) for c, answers in zip(completions, answer, strict=True)]


def exact_match(completions: Conversations, answer: Answers, **_: object) -> list[float]:
    """Return 1.0 if the episode ends with an accepted answer, up to case and surrounding space."""
    return [float(_is_solved(c, answers)) for c, answers in zip(completions, answer, strict=True)]


def settlement(completions: Conversations, answer: Answers, **_: object) -> list[float]:
    """Return minus the sum of the turn rewards, so that the potential is 0 at the end of an episode."""
    advances = zip(tool_execution(completions), search_hit(completions, answer), strict=True)
    return [-math.fsum(advance) for advance in advances]


def _results(conversation: Sequence[Message]) -> list[str]:
    """Return the results of tool calls; a reply without a result counts as an error."""
    return [
        original.tag_content("result", reply["content"]) or "Error:"
        for message, reply in pairwise(conversation)
        if message["role"] == "assistant" and (action := parse_action(message["content"])) and action.kind == "tool"
    ]


def _is_solved(conversation: Sequence[Message], answers: Sequence[str]) -> bool:
    """Whether the conversation ends with an accepted answer."""
    last = conversation[-1]
    action = parse_action(last["content"]) if last["role"] == "assistant" else None
    accepted = {each.lower().strip() for each in answers}
    return action is not None and action.kind == "answer" and action.text.lower().strip() in accepted


def _place(wanted: list[str], words: list[str]) -> int | None:
    """Return the index at which the wanted words occur consecutively; None if they do not."""
    starts = range(len(words) - len(wanted) + 1)
    return next((start for start in starts if words[start : start + len(wanted)] == wanted), None)


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


TURN_REWARD_FUNCS = [tool_execution, search_hit]
OUTCOME_REWARD_FUNCS = [exact_match, settlement]
