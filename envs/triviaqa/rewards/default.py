"""The answer is paid 1.0; searches are paid in advance, by the turn rewards of MT-GRPO, and give it back at the end.

An episode earns 1.0 with an accepted answer and 0.0 without one, whatever its searches did, so no policy can live on
searches. A search that finds the answer is still paid where it happens: the two turn rewards are a potential, which is
0 at the end of an episode, and such a shaping changes the best policy in no way (Ng, Harada and Russell 1999).

What a turn does is read strictly, as the environment reads it; `<think>…</think>` is not read at all. An accepted
answer counts in a result where it stands as whole words: `It` is not in `with`.
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
"""The published rewards add up to 2.6, and these to 1.0."""
_WORD = re.compile(r"\w+")

Conversations = Sequence[Sequence[Message]]
Answers = Sequence[Sequence[str]]


def tool_execution(completions: Conversations, **_: object) -> list[float]:
    """0.2 / 2.6 x the share of calls without an error."""
    return [0.2 * SCALE * original.executed(_results(conversation)) for conversation in completions]


def search_hit(completions: Conversations, answer: Answers, **_: object) -> list[float]:
    """0.5 / 2.6 if an accepted answer is in a result."""

    def found(conversation: Sequence[Message], answers: Sequence[str]) -> bool:
        read = [_words(result) for result in _results(conversation) if not result.startswith("Error:")]
        wanted = [words for each in answers if (words := _words(each))]
        return any(_place(words, result) is not None for words in wanted for result in read)

    return [0.5 * SCALE * found(c, answers) for c, answers in zip(completions, answer, strict=True)]


def exact_match(completions: Conversations, answer: Answers, **_: object) -> list[float]:
    """1.0 if the episode ends with a short answer that is an accepted one, but for case and blanks around."""
    return [float(_is_solved(c, answers)) for c, answers in zip(completions, answer, strict=True)]


def settlement(completions: Conversations, answer: Answers, **_: object) -> list[float]:
    """What the turns were paid in advance, taken back: the potential is 0 at the end of an episode."""
    advances = zip(tool_execution(completions), search_hit(completions, answer), strict=True)
    return [-math.fsum(paid) for paid in advances]


def _results(conversation: Sequence[Message]) -> list[str]:
    """The results of tool calls; a reply that holds none counts as an error."""
    return [
        original.held("result", reply["content"]) or "Error:"
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
    """Where the wanted words stand in a row."""
    starts = range(len(words) - len(wanted) + 1)
    return next((start for start in starts if words[start : start + len(wanted)] == wanted), None)


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


TURN_REWARD_FUNCS = [tool_execution, search_hit]
OUTCOME_REWARD_FUNCS = [exact_match, settlement]
