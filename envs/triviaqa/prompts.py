"""All texts of the environment, except the results of tools."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from envs.triviaqa.protocol import without_tags
from envs.triviaqa.tools import describe
from mtrl.environments.tools import Tool
from mtrl.types import Message, Row

SYSTEM = """You answer trivia questions with the help of tools:

{tools}

In each turn, reason first and then do exactly one of these:
- call a tool: <reasoning>why</reasoning><tool>{{"name": "the tool", "args": {{"the argument": "its value"}}}}</tool>
  Its result comes back inside <result> and </result>; what begins with "Error:" did not work.
- answer: <reasoning>why</reasoning><answer>the answer</answer>
  This ends the task. Write the answer alone: one name, number or short phrase, without a sentence around it.
You may call tools several times; the number of turns is limited."""


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
    """Return the style of a row. Generated rows are short unless `environment.config.full_prompt` is set."""
    return SHORT if row and row.get("style") == "short" else FULL


def full_prompt(question: str, tools: Mapping[str, Tool]) -> list[Message]:
    """Return the prompt for a real language model."""
    return [
        {"role": "system", "content": SYSTEM.format(tools=describe(tools))},
        {"role": "user", "content": question},
    ]
