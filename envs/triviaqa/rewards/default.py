"""The six rewards of MT-GRPO in the published proportions, scaled to 1.0 in all, with their holes closed.

What differs from `original.py`, beside the division by 2.6:

- What a turn does is read strictly, as the environment reads it; `<think>…</think>` is not read at all.
- An accepted answer counts where it stands as whole words: `It` is not in `with`.
- `search_hit` is paid once, to whichever turn finds the answer, not only to the first.
- `exist_answer` wants an accepted answer and beside it only words that name nothing: "the beatles" for "Beatles", but
  neither "Paris London Rome Berlin" nor "Paris or London" for "Paris".
- Outcome rewards are for an episode that ends with an answer, and one that is short: at most two words longer than the
  longest accepted one. Calling tools to the end, or a list of candidates, earns none of them.
- `format` counts what is needed to read a turn, half of it each: one action, and reasoning before it. What stands
  around them neither costs nor earns anything, and a message without fields gets nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import pairwise

from envs.triviaqa.protocol import parse_action, reasons
from envs.triviaqa.rewards import original
from mtrl.types import Message

SCALE = 1 / 2.6
"""The published maximum is 2.6."""
EXTRA_WORDS = 2
"""An answer may be so many words longer than the longest accepted one."""
NAMING_NOTHING = frozenset({"a", "an", "at", "by", "in", "is", "it", "its", "of", "on", "the", "to", "was", "were"})
"""Words that may stand beside an accepted answer."""
_WORD = re.compile(r"\w+")

Conversations = Sequence[Sequence[Message]]
Answers = Sequence[Sequence[str]]
Rule = Callable[[str, Sequence[str]], bool]
"""Of an answer and the accepted ones."""


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


def exist_answer(completions: Conversations, answer: Answers, **_: object) -> list[float]:
    """0.5 / 2.6 if the answer is an accepted one, perhaps beside words that name nothing."""

    def exists(said: str, answers: Sequence[str]) -> bool:
        return _is_accepted(said, answers) or any(_names_only(_words(said), _words(each)) for each in answers)

    return [0.5 * SCALE * _judged(c, answers, exists) for c, answers in zip(completions, answer, strict=True)]


def exact_match(completions: Conversations, answer: Answers, **_: object) -> list[float]:
    """1.0 / 2.6 if the answer is an accepted one, but for case and blanks around."""
    return [SCALE * _judged(c, answers, _is_accepted) for c, answers in zip(completions, answer, strict=True)]


def format_reward(completions: Conversations, answer: Answers, **_: object) -> list[float]:
    """0.2 / 2.6 x the mean over messages of 0.5 for one action and 0.5 for reasoning before it."""
    return [0.2 * SCALE * _shape(c, answers, _form) for c, answers in zip(completions, answer, strict=True)]


def xml(completions: Conversations, answer: Answers, **_: object) -> list[float]:
    """0.2 / 2.6 x the mean over messages of the share of tags that are opened and closed exactly once, at least 0."""
    shapes = (_shape(c, answers, original.tidiness) for c, answers in zip(completions, answer, strict=True))
    return [max(0.0, 0.2 * SCALE * shape) for shape in shapes]


def _results(conversation: Sequence[Message]) -> list[str]:
    """The results of tool calls; a reply that holds none counts as an error."""
    return [
        original.held("result", reply["content"]) or "Error:"
        for message, reply in pairwise(conversation)
        if message["role"] == "assistant" and (action := parse_action(message["content"])) and action.kind == "tool"
    ]


def _judged(conversation: Sequence[Message], answers: Sequence[str], rule: Rule) -> bool:
    """Whether the conversation ends with a short answer that the rule accepts."""
    action = parse_action(conversation[-1]["content"])
    if action is None or action.kind != "answer" or not _is_short(action.text, answers):
        return False
    return rule(action.text, answers)


def _shape(conversation: Sequence[Message], answers: Sequence[str], rule: Callable[[str], float]) -> float:
    """The mean of a rule over the assistant's messages, if the conversation ends with a short answer."""
    if not _judged(conversation, answers, lambda said, accepted: True):
        return 0.0
    return original.mean_over_messages(
        [{**message, "content": message["content"].rpartition("</think>")[2]} for message in conversation], rule
    )


def _form(text: str) -> float:
    return 0.5 * (1 + reasons(text)) if parse_action(text) else 0.0


def _is_short(said: str, answers: Sequence[str]) -> bool:
    return len(_words(said)) <= max(len(_words(each)) for each in answers) + EXTRA_WORDS


def _is_accepted(said: str, answers: Sequence[str]) -> bool:
    return said.lower().strip() in {each.lower().strip() for each in answers}


def _names_only(said: list[str], wanted: list[str]) -> bool:
    place = _place(wanted, said) if wanted else None
    if place is None:
        return False
    return NAMING_NOTHING.issuperset(said[:place] + said[place + len(wanted) :])


def _place(wanted: list[str], words: list[str]) -> int | None:
    """Where the wanted words stand in a row."""
    starts = range(len(words) - len(wanted) + 1)
    return next((start for start in starts if words[start : start + len(wanted)] == wanted), None)


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


TURN_REWARD_FUNCS = [tool_execution, search_hit]
OUTCOME_REWARD_FUNCS = [exist_answer, exact_match, format_reward, xml]
