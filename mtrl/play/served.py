"""The episodes of a client of the Model Context Protocol, one after the other."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from mtrl.config.schema import Config
from mtrl.environments.factory import Task
from mtrl.environments.tool_calls import TextCall, format_call, message_calls
from mtrl.errors import UserError
from mtrl.play.choices import Choices, find_row, rows_of
from mtrl.play.episode import Rules, TextEpisode, judge
from mtrl.rewards.mixture import make_composer
from mtrl.types import Message, write_jsonl
from mtrl.utils.images import content_text

START, RESPOND = "start_episode", "respond"
ERROR = "Error: "
"""Beginning of the observation of a tool call that failed."""
OWN_TOOLS = (
    {
        "name": START,
        "description": "Start the next episode, and return its task. An episode that is not over is given up.",
        "parameters": {
            "type": "object",
            "properties": {"row": {"type": "string", "description": "id or number of a row; by default the next row"}},
            "additionalProperties": False,
        },
    },
    {
        "name": RESPOND,
        "description": "Give the environment a response that is a text, such as an answer, and return what it says.",
        "parameters": {
            "type": "object",
            "properties": {"text": {"type": "string"}},
            "required": ["text"],
            "additionalProperties": False,
        },
    },
)
"""Tools besides those of the environment, each as OpenAI's `function`."""


@dataclass(frozen=True)
class ToolAnswer:
    """The answer to a tool call of the client."""

    text: str
    is_error: bool = False


class ServedEpisodes:
    """The environment as tools: each call is a turn, and calls that arrive together are taken one after the other.

    The tools of the environment are those of the first episode, which is opened for them. `start_episode` returns the
    task of an episode; `respond` takes a turn without a tool call.
    """

    def __init__(self, config: Config, task: Task, choices: Choices):
        """
        Args:
            choices: `row` is the first row, and finished episodes are written to `out`.

        Raises:
            UserError: the split has no rows, or not the first row.
        """
        self.config, self.task, self.choices = config, task, choices
        self.rows = rows_of(task, choices.split)
        self.place = 0 if choices.row is None else find_row(self.rows, choices.row, choices.split)
        """Number of the next row."""
        self.composer = make_composer(config)
        self.rules = Rules.of(config, task.make_environment)
        self._episode: TextEpisode | None = None
        self._turn = asyncio.Lock()

    async def tools(self) -> list[dict[str, Any]]:
        """Return the tools, each as OpenAI's `function`.

        Raises:
            UserError: the first episode cannot be opened, or the environment has a tool with the name of another.
        """
        async with self._turn:
            episode = self._episode or await self._open()
        offered = [each["function"] for each in episode.tools]
        if names := sorted({each["name"] for each in offered} & {START, RESPOND}):
            raise UserError(f"the environment has a tool named {names[0]}, which the server needs; rename it")
        return [*OWN_TOOLS, *offered]

    async def call(self, name: str, arguments: dict[str, Any]) -> ToolAnswer:
        """Take the call of a client, and return the answer. Every mistake of the client is an answer too."""
        async with self._turn:
            try:
                if name == START:
                    return ToolAnswer(await self._start(arguments.get("row")))
                return await self._take(name, arguments)
            except UserError as error:
                return ToolAnswer(str(error), True)

    async def close(self) -> None:
        """Close the episode and the threads of the environments."""
        if self._episode is not None:
            await self._episode.close()
        self.rules.pool.close()

    async def _start(self, row: Any) -> str:
        episode = self._episode
        if episode is None or episode.trajectory.turns or episode.over or row is not None:
            if row is not None:
                self.place = find_row(self.rows, str(row), self.choices.split)
            episode = await self._open()
        title = f"Row {episode.row['id']} of {self.choices.split}; at most {self.rules.max_turns} turns."
        shown = (f"{each['role']}: {content_text(each['content'])}" for each in episode.observation)
        return "\n\n".join([title, *shown])

    async def _open(self) -> TextEpisode:
        """Open an episode on the next row, in place of the episode before.

        Raises:
            UserError: there is no further row, or the environment fails.
        """
        if self._episode is not None:
            await self._episode.close()
            self._episode = None
        split, place = self.choices.split, self.place
        if place >= len(self.rows):
            raise UserError(f"these were all rows of {split}; give {START} the row of an episode to repeat it")
        self.place += 1
        episode = TextEpisode(self.rules, self.rows[place], f"mcp/{split}/{place}")
        await episode.open()
        if episode.failed:
            await episode.close()
            raise UserError(f"the environment failed on row {episode.row['id']}: {episode.problem}")
        self._episode = episode
        return episode

    async def _take(self, name: str, arguments: dict[str, Any]) -> ToolAnswer:
        """Take one turn of the episode."""
        episode = self._episode
        if episode is None or episode.over:
            raise UserError(f"no episode is open; call {START} first")
        if name == RESPOND:
            await episode.say(str(arguments.get("text", "")))
        else:
            await episode.say(*_called(name, arguments, episode))
        if episode.failed:
            return ToolAnswer(f"the environment failed: {episode.problem}", True)
        said = "\n\n".join(content_text(each["content"]) for each in episode.observation)
        is_error = name != RESPOND and said.startswith(ERROR)
        said = said.removeprefix(ERROR) if is_error else said
        if not episode.over:
            return ToolAnswer(said, is_error)
        return ToolAnswer("\n\n".join(part for part in (said, await self._end(episode)) if part), is_error)

    async def _end(self, episode: TextEpisode) -> str:
        """Compute reward and score of an episode that is over, write it, and return a sentence about it."""
        await episode.close()
        trajectory = episode.trajectory
        await judge(trajectory, episode.row, self.rules, self.composer, self.task.family.score)
        if episode.failed:
            return f"The episode is over, and its reward failed: {episode.problem}"
        if self.choices.out is not None:
            write_jsonl(self.choices.out, [trajectory])
        return f"The episode is over: reward {trajectory.reward:g}, score {trajectory.score:g}."


def _called(name: str, arguments: dict[str, Any], episode: TextEpisode) -> tuple[str, Message]:
    """Return a response that calls a tool, as a text and as a message.

    Raises:
        UserError: the environment has no tools.
    """
    if not episode.tools:
        raise UserError(f"there is no tool {name}; the tools are {START} and {RESPOND}")
    text = format_call(name, arguments)
    calls = message_calls([TextCall(text, name, arguments)], len(episode.trajectory.turns))
    return text, {"role": "assistant", "content": "", "tool_calls": calls}
