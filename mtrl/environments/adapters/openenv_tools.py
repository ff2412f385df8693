"""OpenEnv: an `MCPEnvironment` in this process, or an `MCPToolClient` of one that runs elsewhere.

The tools that the environment lists after `reset` are the model's tools, and each call is a `CallToolAction`. The
reward of a turn is the sum of the rewards of its calls, where a reward of None counts as 0. The episode ends with an
observation that is `done`, or with the first turn that calls no tool, which gets no reward.

`environment.config` holds the arguments of the class (for a client: `base_url`), and `instruction`, the first text for
the model. The seed and the row's `reset` are passed as for other environments of OpenEnv (`openenv.py`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mtrl.environments.adapters.base import EnvironmentAdapter, metrics_of, with_text
from mtrl.environments.adapters.gymnasium import Translator
from mtrl.environments.adapters.openenv import blocking, metadata_of, observation_of, observation_text, start
from mtrl.environments.base import StepResult
from mtrl.environments.tools import NAME, Tool, ToolEnvironment, ToolError, toolbox
from mtrl.errors import UserError, missing_extra
from mtrl.types import Message, Row


class OpenEnvToolsAdapter(ToolEnvironment, EnvironmentAdapter):
    """One episode of an OpenEnv environment whose actions are calls of tools."""

    own_keys = ("instruction",)

    def reset(self, row: Row | None = None) -> list[Message]:
        """Start the episode, and list the environment's tools.

        Raises:
            UserError: the environment has no tools or no text for the model, or a tool has an invalid name.
        """
        super().reset()
        row = row or {"id": ""}
        env = self.make(**self.config)
        observation = observation_of(start(env, row))
        self.toolbox = toolbox(*(self._tool(each) for each in self._listed()))
        messages = list(row.get("prompt") or [])
        for text in (self.own.get("instruction"), observation_text(observation)):
            if text and text != "{}":  # an observation without fields of its own
                messages = with_text(messages, text)
        if not messages:
            raise UserError(
                f"{type(self).__name__} starts without a text for the model; set environment.config.instruction"
            )
        return messages

    def opened(self, env: Any) -> Any:
        return blocking(env)

    async def respond(self, message: Message, response: str, ground_truth: dict[str, Any]) -> Any:
        self._results: list[Any] = []
        result = await super().respond(message, response, ground_truth)
        earned = sum(each.reward for each in self._results if each.reward is not None)
        numbers: dict[str, float] = {}
        for each in self._results:
            numbers |= metrics_of(metadata_of(each))
        return replace(result, reward=result.reward + earned, metrics={**numbers, **result.metrics})

    def answer(self, response: str, ground_truth: dict[str, Any]) -> StepResult:
        return StepResult(0.0, None, done=True)

    def _listed(self) -> list[Any]:
        observation = observation_of(self.env.step(_actions().ListToolsAction()))
        tools = list(getattr(observation, "tools", None) or ())
        if not tools:
            problem = (getattr(observation, "metadata", None) or {}).get("error") or "the list is empty"
            raise UserError(f"{type(self).__name__} offers the model no tools ({problem}); check its MCP server")
        return tools

    def _tool(self, offered: Any) -> Tool:
        if not NAME.fullmatch(offered.name):
            raise UserError(
                f"{type(self).__name__} has a tool named {offered.name[:80]!r}; a name has 1 to 64 letters, digits, "
                "_ or -"
            )

        def call(**arguments: Any) -> Any:
            return self._step(offered.name, arguments)

        function = {
            "name": offered.name,
            "description": offered.description or offered.name,
            "parameters": offered.input_schema,
        }
        return Tool(offered.name, {"type": "function", "function": function}, call)

    def _step(self, name: str, arguments: dict[str, Any]) -> Any:
        """Return the text of a call, or a `StepResult` if the episode is over.

        Raises:
            ToolError: the tool reports an error, which the model sees.
            UserError: the environment failed, which fails the episode.
        """
        results = self._results  # a call that exceeds its time limit must not be counted in a later turn
        try:
            result = self.env.step(_actions().CallToolAction(tool_name=name, arguments=arguments))
        except Exception as error:
            raise UserError(
                f"{type(self).__name__} failed in the tool {name}: {error or type(error).__name__}"
            ) from error
        results.append(result)
        observation = observation_of(result)
        problem = getattr(observation, "error", None)
        if problem is not None and problem.error_type == "transport_error":
            raise UserError(f"{type(self).__name__} cannot reach the tool {name}: {problem.message}")
        if not result.done:
            if problem is not None:
                raise ToolError(problem.message)
            return _content(name, observation)
        try:
            text = f"Error: {problem.message}" if problem is not None else _content(name, observation)
        except ToolError as error:
            text = f"Error: {error}"
        return StepResult(0.0, text if isinstance(text, str) else json.dumps(text, default=str), done=True)

    load = staticmethod(Translator.load)


def _content(name: str, observation: Any) -> Any:
    """Return what the model sees of a result: the text of an MCP result, and any other result unchanged.

    Raises:
        ToolError: the result is an error, or holds content that is no text.
    """
    result = getattr(observation, "result", observation_text(observation))
    fields = result if isinstance(result, Mapping) else getattr(result, "__dict__", {})
    content = fields.get("content")
    if not isinstance(content, list) or not content:
        return fields["structured_content"] if fields.get("structured_content") is not None else result
    parts = [each if isinstance(each, Mapping) else each.__dict__ for each in content]
    if others := sorted({str(each.get("type")) for each in parts} - {"text"}):
        raise ToolError(f"{name} returned content that is no text ({', '.join(others)})")
    text = "\n".join(each["text"] for each in parts)
    if fields.get("is_error"):
        raise ToolError(text)
    return text


def _actions() -> Any:
    try:
        from openenv.core.env_server import mcp_types
    except ImportError as error:
        raise missing_extra("openenv", "openenv") from error
    return mcp_types
