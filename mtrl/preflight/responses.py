"""Parts of a response: the position of its answer, and other answers for that position."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass

THINKING = ("think", "thinking", "reasoning", "scratchpad")
"""Tags that hold no answer."""
TAGGED = re.compile(r"<([A-Za-z_][\w-]*)>(.*?)</\1>", re.DOTALL)
BOXED = re.compile(r"\\boxed\{([^{}]*)\}")
MARKED = re.compile(r"(?<!#)####(?!#)[ \t]*(.*)\Z", re.DOTALL)
NUMBER = re.compile(r"-?\$?[\d,]*\.?\d+")

FUZZ = (
    "",
    " ",
    "\n\n\n",
    "?",
    "yes",
    "I do not know.",
    "0",
    "-1",
    "#### ",
    "#### nan",
    "#### 1e999",
    "\\boxed{}",
    "{}",
    "[]",
    "null",
    '{"name": "no_such_tool", "arguments": {}}',
    '<tool_call>{"name": null}</tool_call>',
    "<tool_call>not json</tool_call>",
    "<answer></answer>",
    "<answer>",
    "</answer>",
    "<final_output>{</final_output>",
    "<sql>;</sql>",
    "<solution></solution>",
    "<think>" * 50,
    "((((" * 500,
    "[" * 3000,
    "a" * 20_000,
    "```\n```",
    "```python\nraise SystemExit(3)\n```",
    "\x00\x01\x1b[2J",
    "\u202e\u200b\ufeff\U0001f9ee \u0661\u0662",
    "%s %n {0} {x!r} ${HOME} $(id) `id`",
    "'; drop table users; --",
    "../../../../etc/passwd",
    "9" * 400,
    "nan",
    "inf",
)
"""Responses that a policy at temperature 1 may give, and responses that break parsers. The list is fixed, so that runs
are comparable."""
IDLE = ("", "?", "yes")
"""Responses without content."""
LONG = (1_000, 20_000)
"""Numbers of filler characters before the answer of a long response."""


@dataclass(frozen=True)
class ResponseParts:
    """A response, split around its answer."""

    before: str
    answer: str
    after: str

    def with_answer(self, answer: str) -> str:
        return f"{self.before}{answer}{self.after}"


def parts(response: str) -> ResponseParts:
    """Split a response. The answer is the content of the last tag that is no thinking tag, or else of `\\boxed{}`, or
    else the text after `####`, or else the whole response."""
    tags = [match for match in TAGGED.finditer(response) if match[1].lower() not in THINKING]
    boxes = list(BOXED.finditer(response))
    marked = MARKED.search(response)
    if tags:
        start, end = tags[-1].span(2)
    elif boxes:
        start, end = boxes[-1].span(1)
    elif marked:
        start, end = marked.span(1)
    else:
        start, end = 0, len(response)
    return ResponseParts(response[:start], response[start:end], response[end:])


def padded(response: str, characters: int) -> str:
    """Insert filler at the end of the thinking if the response has any, or else before the response."""
    around, filler = parts(response), ("because " * (characters // 8 + 1))[:characters]
    head, mark, tail = around.before.rpartition("</think>")
    return f"{head}{filler}{mark}{tail}{around.answer}{around.after}" if mark else f"{filler}{response}"


def nonsense(response: str) -> list[str]:
    """Return responses of exactly this form with meaningless answers."""
    around = parts(response)
    answer = around.answer.strip()
    made = ["zq"]
    if NUMBER.fullmatch(answer):
        made = [_other_number(answer), "987654321"]
    elif (fields := json_object(answer)) is not None:
        made = [json.dumps({name: "zq" for name in fields})]
    elif any(character.isalnum() for character in answer):
        made = [re.sub(r"[^\W\d_]+", "zq", answer), "zq"]
    return [around.with_answer(text) for text in dict.fromkeys(made) if text != around.answer]


def _other_number(text: str) -> str:
    return re.sub(r"\d", lambda digit: str((int(digit[0]) + 3) % 10), text)


def final_answers(response: str, others: Iterable[str]) -> list[str]:
    """Return `response` with each answer of `others` in place of its own."""
    around = parts(response)
    return [around.with_answer(answer) for answer in dict.fromkeys(parts(other).answer for other in others)]


def json_object(text: str) -> dict | None:
    """Parse the text as a JSON object, with or without a code fence; None if it is anything else."""
    fenced = re.fullmatch(r"```(?:json)?\s*(.*?)\s*```", text.strip(), re.DOTALL)
    try:
        value = json.loads(fenced[1] if fenced else text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def tag_names(text: str) -> list[str]:
    """Return the names of the tags that are opened and closed in the text, in order, without duplicates."""
    return list(dict.fromkeys(match[1] for match in TAGGED.finditer(text)))
