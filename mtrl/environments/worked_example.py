"""The worked example of a full prompt: a whole episode as text, which the pre-flight runs against the environment.

The example is the end of the system message. It is text, and no messages of its own, so that a scorer or a reward that
reads the conversation never takes it for an episode of the policy::

    Here is an example of a whole episode, for another task:

    User: How many pens are 3 boxes of 12 pens?
    Assistant calls calculate: {"expression": "3 * 12"}
    Tool: 36
    Assistant: 36 pens.

A line with `Assistant calls` describes a call of a tool that the environment offers by its schema. It shows name and
arguments, and leaves the notation of calls to the chat template of the model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from mtrl.environments.tool_calls import format_call
from mtrl.types import Message
from mtrl.utils.images import content_text

HEADING = "Here is an example of a whole episode, for another task:"
_SPEAKER = re.compile(r"^(User|Tool|Assistant|Assistant calls (?P<tool>[\w-]+)): ", re.MULTILINE)

Line = tuple[str, str]
"""Speaker and text of one line of an example: `("Assistant", "36 pens.")`."""


@dataclass(frozen=True)
class WorkedExample:
    """A worked example, as read from a prompt."""

    instructions: str
    """The text of the system message before the example."""
    lines: tuple[Line, ...]

    @property
    def responses(self) -> list[str]:
        """The assistant's turns. Calls are in the text form that `mtrl.environments.tool_calls` parses."""
        return ["".join(_response(*line) for line in turn) for turn in self._turns(is_assistant=True)]

    @property
    def replies(self) -> list[str]:
        """The texts that come before the assistant's turns: the task, then the environment's replies."""
        return ["".join(text for _, text in turn) for turn in self._turns(is_assistant=False)]

    def _turns(self, is_assistant: bool) -> list[list[Line]]:
        """Return the lines of one side, grouped into runs that the other side does not interrupt."""
        turns: list[list[Line]] = []
        last = None
        for line in self.lines:
            side = line[0].startswith("Assistant")
            if side == is_assistant:
                turns = turns if side == last else [*turns, []]
                turns[-1].append(line)
            last = side
        return turns


def calling(tool: str, arguments: dict[str, object]) -> Line:
    """Return the line of a tool call."""
    return f"Assistant calls {tool}", json.dumps(arguments, ensure_ascii=False)


def with_example(instructions: str, lines: Sequence[Line]) -> str:
    """Return the text of a system message: the instructions, and then the example."""
    transcript = "\n".join(f"{speaker}: {text}" for speaker, text in lines)
    return f"{instructions.strip()}\n\n{HEADING}\n\n{transcript}"


def read_example(prompt: Sequence[Message]) -> WorkedExample | None:
    """Return the worked example of a prompt; None if the prompt has none."""
    for message in prompt:
        instructions, heading, transcript = content_text(message.get("content")).partition(HEADING)
        if heading:
            starts = list(_SPEAKER.finditer(transcript))
            ends = [each.start() for each in starts[1:]] + [len(transcript)]
            texts = [transcript[each.end() : end].strip("\n") for each, end in zip(starts, ends, strict=True)]
            return WorkedExample(instructions, tuple((each[1], text) for each, text in zip(starts, texts, strict=True)))
    return None


def _response(speaker: str, text: str) -> str:
    tool = speaker.removeprefix("Assistant").removeprefix(" calls ")
    if not tool:
        return text
    try:
        return format_call(tool, json.loads(text))
    except ValueError:
        return text
