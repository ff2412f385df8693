"""All texts of the environment, except the results of tools."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from envs.triviaqa.protocol import without_tags
from envs.triviaqa.tools import describe
from mtrl.environments.tools import Tool
from mtrl.environments.worked_example import Line, with_example
from mtrl.types import Message, Row

SYSTEM = """You answer trivia questions with the help of tools:

{tools}

In each turn, reason first and then do exactly one of these:
- call a tool: <reasoning>why</reasoning><tool>{{"name": "the tool", "args": {{"the argument": "its value"}}}}</tool>
  Its result comes back inside <result> and </result>; what begins with "Error:" did not work.
- answer: <reasoning>why</reasoning><answer>the answer</answer>
  This ends the task. Write the answer alone: one name, number or short phrase, without a sentence around it.
You may call tools several times; the number of turns is limited."""
QUESTION: Line = ("User", "Which river flows through Rome?")
SEARCH: list[Line] = [
    (
        "Assistant",
        '<reasoning>An article about Rome names the river.</reasoning><tool>{"name": "wiki_search", "args": {"query": '
        '"Rome river"}}</tool>',
    ),
    ("User", "<result>\nRome\nRome is the capital of Italy. The river Tiber flows through it.\n</result>"),
]
ANSWER: Line = ("Assistant", "<reasoning>The river is the Tiber.</reasoning><answer>Tiber</answer>")
EXAMPLE_ROW: Row = {"id": "worked example", "prompt": [], "ground_truth": {"answers": ["Tiber"]}}
"""The row that the example solves."""


@dataclass(frozen=True)
class Style:
    """Wording and layout of results."""

    result: str
    malformed: str
    one_line: bool

    def reply(self, result: str | None, characters: int) -> str:
        """Return the observation after a tool call with this result, or after an invalid turn (None)."""
        if result is None:
            return self.malformed
        text = without_tags(result)
        if self.one_line:
            text = " ".join(text.split())
        if len(text) > characters:
            text = f"{text[:characters].rstrip()}…"
        return self.result.format(text=text)


FULL = Style(
    result="<result>\n{text}\n</result>",
    malformed="Error: write exactly one tool call or one answer after your reasoning, each inside its tags.",
    one_line=False,
)
SHORT = Style(
    # With a space before every word, a word is the same token here and in the answer: a tiny model can copy it.
    result="<result> {text}</result>",
    malformed="Error: one call or one answer",
    one_line=True,
)
"""Style for models with contexts of a few dozen tokens."""


def style_of(row: Row | None) -> Style:
    """Return the style of a row. Generated rows are short with `environment.prompt=short`."""
    return SHORT if row and row.get("style") == "short" else FULL


def full_prompt(question: str, tools: Mapping[str, Tool], example: bool = True) -> list[Message]:
    """Return the prompt for a language model. Prompts of `environment.prompt=short` for rows of `data.path` lack the
    worked example. The example searches if the tools are the default ones."""
    system = SYSTEM.format(tools=describe(tools))
    if example:
        system = with_example(system, [QUESTION, *(SEARCH if "wiki_search" in tools else []), ANSWER])
    return [
        {"role": "system", "content": system},
        {"role": "user", "content": question},
    ]
