"""Conversations as messages, for models behind a chat API: such an API reports no token ids and no log-probs."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from typing import Any

from mtrl.environments.tool_calls import OPEN, TextCall, message_calls, parse_calls, text_of
from mtrl.generator.engines.base import Generation
from mtrl.strict_json import strict_loads
from mtrl.types import Message, Turn

NAMELESS = "unknown"
"""Function name sent for a call in which the model gave no name: APIs refuse calls without one."""


@dataclass(frozen=True)
class ChatPrompt:
    """Request to an endpoint: OpenAI's `messages`, and `tools` if the environment has any."""

    messages: list[Message]
    tools: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class ChatGeneration(Generation):
    """A turn that an endpoint answered. Its ids and log-probs are empty."""

    content: str = ""
    reasoning: str | None = None
    calls: list[TextCall] = field(default_factory=list)
    """Tool calls that the API itself parsed, including malformed ones."""
    usage: dict[str, float] = field(default_factory=dict)
    """Entries for `Turn.metrics`: `prompt_tokens`, `completion_tokens`, `cached_tokens`, `retries`."""
    is_full: bool = False
    """Whether the server reported that the context has no room for another token."""


class ChatConversation:
    """Conversation in which every turn is its own message. See `mtrl.generator.conversation.Dialogue`."""

    def __init__(self, messages: list[Message], tools: list[dict[str, Any]] | None = None):
        self.tools = tools or []
        self.messages = list(messages)
        self.turns: list[Turn] = []
        self.prompt_tokens = 0
        """Tokens of the last prompt and its answer, as the server counted them; 0 before the first answer, and
        `sys.maxsize` once the context is full."""
        self._new: list[Message] = list(messages)

    @property
    def prompt(self) -> ChatPrompt:
        return ChatPrompt(to_wire(self.messages), self.tools)

    def add_action(self, generation: ChatGeneration) -> Turn:
        """Append the endpoint's answer to `prompt`."""
        message = self._message(generation)
        turn = Turn(
            observation_ids=[],
            action_ids=[],
            action_logprobs=[],
            version_spans=[],
            finish=generation.finish,
            text=text_of(message),
            message=message,
            observation=self._new,
            metrics=dict(generation.usage),
        )
        self.turns.append(turn)
        self.messages.append(message)
        usage = generation.usage
        self.prompt_tokens = int(usage.get("prompt_tokens", 0) + usage.get("completion_tokens", 0))
        if generation.is_full:
            self.prompt_tokens = sys.maxsize
        return turn

    def add_observation(self, messages: list[Message]) -> None:
        """Append the environment's messages."""
        self.messages += messages
        self._new = messages

    def _message(self, generation: ChatGeneration) -> Message:
        """Return the assistant message of a generation.

        Calls in the text form count too: a server that is not configured to parse a model's calls leaves them in the
        content.
        """
        calls: list[TextCall] = generation.calls
        if self.tools and not calls and OPEN in generation.content:
            calls = parse_calls(generation.content)[1]
        message: Message = {"role": "assistant", "content": generation.content}
        if generation.reasoning:
            message["reasoning_content"] = generation.reasoning
        if calls:
            message["tool_calls"] = message_calls(calls, len(self.turns))
        return message


def to_wire(messages: list[Message]) -> list[Message]:
    """Return the messages in the form that OpenAI's API takes.

    The API takes arguments as JSON text, a tool result must name a call of the assistant, and unknown keys may be
    refused. Unknown keys and the reasoning of past turns are therefore not sent. Calls in the text form are sent as
    that text. A tool result that answers such a call, or no call, is sent as a user message.
    """
    wire: list[Message] = []
    called: set[str] = set()
    for message in messages:
        role, content = message["role"], message.get("content")
        content = content if isinstance(content, str | list) else "" if content is None else json.dumps(content)
        sent: Message = {"role": role, "content": content}
        calls = message.get("tool_calls") or []
        if role == "assistant" and calls and not (isinstance(content, str) and OPEN in content):
            sent["tool_calls"] = [_call_to_wire(call) for call in calls]
            called.update(call["id"] for call in sent["tool_calls"])
        elif role == "tool" and message.get("tool_call_id") in called:
            sent["tool_call_id"] = message["tool_call_id"]
        elif role == "tool":
            sent["role"] = "user"
        wire.append(sent)
    return wire


def calls_from_wire(calls: Any) -> list[TextCall]:
    """Parse the `tool_calls` of an answer. A defect in a call becomes its status, as with calls in sampled text."""
    return [_call_from_wire(call) for call in calls] if isinstance(calls, list) else []


def _call_to_wire(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {
        "id": call["id"],
        "type": "function",
        "function": {"name": function["name"] or NAMELESS, "arguments": text},
    }


def _call_from_wire(call: Any) -> TextCall:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return TextCall(json.dumps(call), status="malformed_structure")
    call_id = call.get("id")
    name, arguments = function.get("name"), function.get("arguments")
    raw = arguments if isinstance(arguments, str) else json.dumps(arguments)
    named = TextCall(raw, name if isinstance(name, str) else None, id=call_id if isinstance(call_id, str) else None)
    try:
        found = strict_loads(arguments or "{}") if isinstance(arguments, str | None) else arguments
    except ValueError:
        return named._replace(status="invalid_json")
    if not isinstance(found, dict):
        return named._replace(status="malformed_structure")
    return named._replace(arguments=found, status="ok" if named.name else "missing_name")


def closed(content: str, stop: tuple[str, ...]) -> str:
    """Return `content` with the stop string that the API cut off, where it can be inferred.

    The engines of mtrl leave stop strings in the text, and environments look for them; APIs remove them. A stop string
    such as `</sql>` is appended if the content has more `<sql>` than `</sql>`.
    """
    for text in stop:
        opening = text.replace("</", "<", 1)
        if text.startswith("</") and content.count(opening) > content.count(text):
            return content + text
    return content
