"""The conversation of an episode as messages, for models behind a chat API: such an API reports no token ids and no
log-probs."""

from __future__ import annotations

import sys
from typing import Any

from mtrl.engines.endpoints.wire import ChatGeneration, ChatPrompt, to_wire
from mtrl.environments.tool_calls import OPEN, TextCall, message_calls, parse_calls, text_of
from mtrl.types import Message, Turn


class ChatConversation:
    """Conversation in which every turn is its own message. See `mtrl.rollout.conversation.Dialogue`."""

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
