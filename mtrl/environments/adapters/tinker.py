"""tinker-cookbook: `MessageEnv`, whose `step` takes the assistant's message and returns the whole conversation.

The class is made with `environment.config` and the columns of the row that its constructor names. The conversation that
`step` returns must extend the last one, because sampled tokens never change. The messages after the assistant's message
are the observation. Tool calls, in the model's own form or in the text form of `mtrl/environments/tool_calls.py`, are
passed as tinker's `ToolCall` objects.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable
from typing import Any, ClassVar

from mtrl.environments.adapters.base import EnvironmentAdapter, accepted, metrics_of, plain_message
from mtrl.environments.base import StepResult
from mtrl.environments.tool_calls import message_calls, parse_calls
from mtrl.errors import missing_extra
from mtrl.types import Message, Row


class MessageEnvAdapter(EnvironmentAdapter):
    """One episode of a `MessageEnv`."""

    row_arguments = True
    tools: ClassVar[list[dict[str, Any]]] = []
    """Tool schemas; none, because a `MessageEnv` describes its tools in its own first messages."""

    def reset(self, row: Row | None = None) -> Any:  # returns an awaitable; the foreign class is made on a thread
        super().reset()
        self.make(**{**accepted(self.foreign, row or {}), **self.config})
        return self._open(self.env.initial_observation())

    async def _open(self, opening: Awaitable[list[Any]]) -> list[Message]:
        # Copies, because environments return the list that they later change.
        self.history = [plain_message(message) for message in await opening]
        return list(self.history)

    async def step(self, response: str, ground_truth: dict[str, Any]) -> StepResult:  # type: ignore[override]
        return await self.respond({"role": "assistant", "content": response}, response, ground_truth)

    async def respond(self, message: Message, response: str, ground_truth: dict[str, Any]) -> StepResult:
        self.current_turn += 1
        if not message.get("tool_calls"):  # a renderer without tools does not parse calls
            content, attempts = parse_calls(response)
            message = {"content": content, "tool_calls": message_calls(attempts, self.current_turn)}
        result = await self.env.step(_message(message))
        conversation = [plain_message(each) for each in result.next_messages]
        known = len(self.history)
        goes_on = conversation[:known] == self.history and len(conversation) > known
        if not goes_on and not result.episode_done:
            raise ValueError(
                f"{type(self).__name__}.step returned a conversation that does not go on from the last one; "
                "next_messages must be the last messages, the assistant's message and what is new"
            )
        new = conversation[known + 1 :] if goes_on else None
        self.history = conversation
        return StepResult(result.reward, new, result.episode_done, metrics=metrics_of(result.metrics))


def _message(message: Message) -> dict[str, Any]:
    """Return the message in the form to which tinker's renderers parse it."""
    parsed: dict[str, Any] = {"role": "assistant", "content": message.get("content") or ""}
    calls = message.get("tool_calls")
    if not calls:
        return parsed
    try:
        from tinker_cookbook.renderers.base import ToolCall, UnparsedToolCall
    except ImportError as error:
        raise missing_extra("tinker_cookbook", "tinker") from error
    parsed["tool_calls"], parsed["unparsed_tool_calls"] = [], []
    for call in calls:
        function = call["function"]
        if problem := call.get("malformed"):
            parsed["unparsed_tool_calls"].append(UnparsedToolCall(raw_text=str(function["arguments"]), error=problem))
        else:
            body = ToolCall.FunctionBody(name=function["name"], arguments=json.dumps(function["arguments"]))
            parsed["tool_calls"].append(ToolCall(id=call.get("id"), function=body))
    return parsed
