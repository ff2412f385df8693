"""One episode's tokens. The sampled ids never change; only the environment's messages are ever encoded.

There are two layouts (`generator.use_conversation_multi_turn`): every turn is its own message, or all turns are inside
one assistant message.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mtrl.environments.tool_calls import TextCall, message_calls
from mtrl.errors import UserError
from mtrl.rollout.control_tokens import ControlTokens
from mtrl.types import Generation, Message, Turn, images_in
from mtrl.utils.expert_ids import before_last_tokens, first_rows
from mtrl.utils.images import content_text, refuse_other_parts

NO_IMAGES = (
    "a message holds an image, and only text is read here; take model=tiny_vision, or a Qwen-VL model with "
    "generator=local"
)


class Renderer(Protocol):
    """The part of the `renderers` package's protocol that a conversation needs."""

    def render_ids(
        self, messages: list[Message], *, tools: Any = None, add_generation_prompt: bool = False
    ) -> list[int]: ...

    def parse_response(
        self, token_ids: list[int], *, tools: Any = None, prompt_ids: list[int] | None = None
    ) -> Any: ...

    def get_stop_token_ids(self) -> list[int]: ...

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: list[Message],
        *,
        tools: Any = None,
    ) -> Any: ...


class Dialogue(Protocol):
    """Interface of a conversation, which holds token ids (`Conversation`) or messages (`ChatConversation`)."""

    turns: list[Turn]

    @property
    def prompt(self) -> Any:
        """The whole context of the next turn, in the form that the engine takes."""

    @property
    def prompt_tokens(self) -> int:
        """Length of the context in tokens, as far as it is known."""

    def add_action(self, generation: Any) -> Turn:
        """Append the turn that the engine sampled after `prompt`."""

    def add_observation(self, messages: list[Message]) -> None:
        """Append the environment's messages."""


@dataclass
class Codec:
    """A tokenizer and its renderer, which turn messages into ids and back. All conversations of a run share one."""

    tokenizer: Any
    renderer: Renderer

    def __post_init__(self) -> None:
        self.stop_token_ids = tuple(self.renderer.get_stop_token_ids())
        self.control = ControlTokens(self.tokenizer)

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def encode(self, text: str) -> list[int]:
        """Encode plain text, without the template."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def render(self, messages: list[Message], tools: list[dict[str, Any]] | None = None) -> list[int]:
        """Return the ids of the whole context of the assistant's next turn after `messages`.

        No text in the messages and in the schemas of the tools is encoded as a control token.

        Raises:
            UserError: a message holds an image, and the model reads text only.
        """
        self.check_images(messages)
        messages, tools = self.control.escape_messages(messages), self.control.escape_tools(tools)
        return list(self.renderer.render_ids(messages, tools=tools, add_generation_prompt=True))

    def extend(
        self,
        prompt_ids: list[int],
        action_ids: list[int],
        messages: list[Message],
        tools: list[dict[str, Any]] | None = None,
    ) -> list[int] | None:
        """Return the ids of the whole context after `messages` answered `action_ids`.

        The sampled ids stay unchanged. The closing token of a turn that its length limit cut is added as context.
        The result is None if the renderer cannot tell which ids `messages` add; the caller then renders the whole
        conversation again.

        Raises:
            UserError: as for `render`.
        """
        self.check_images(messages)
        messages, tools = self.control.escape_messages(messages), self.control.escape_tools(tools)
        bridged = self.renderer.bridge_to_next_turn(prompt_ids, action_ids, messages, tools=tools)
        return None if bridged is None else list(getattr(bridged, "token_ids", bridged))

    def check_images(self, messages: Sequence[Message]) -> None:
        """Refuse images, which would be silently left out of the context.

        Raises:
            UserError: a message holds an image, or a part in the form of another program.
        """
        refuse_other_parts(messages)
        if images_in(messages):
            raise UserError(NO_IMAGES)

    def without_stop(self, ids: list[int]) -> list[int]:
        """Return the sampled ids without their closing token."""
        return ids[:-1] if ids and ids[-1] in self.stop_token_ids else ids

    def parse(
        self, ids: list[int], prompt_ids: list[int], tools: list[dict[str, Any]] | None, turn_index: int
    ) -> Message:
        """Parse the ids that were sampled after `prompt_ids` into the assistant's message.

        Args:
            turn_index: index of the turn, which becomes part of the ids of its calls.

        Raises:
            ValueError: the renderer cannot parse the ids, and there are no tools. With tools the message gets a
                malformed call instead, which the environment reports to the model.
        """
        calls: Any
        try:
            parsed = self.renderer.parse_response(ids, tools=tools, prompt_ids=prompt_ids)
            message: Message = {"role": "assistant", "content": parsed.content}
            reasoning, calls = parsed.reasoning_content, parsed.tool_calls
        except (ValueError, RecursionError):
            if not tools:
                raise
            # The cause is for example a number of 5,000 digits, or 5,000 brackets. That is the model's mistake, so the
            # environment reports it to the model.
            text = self.decode(self.without_stop(ids))
            message = {"role": "assistant", "content": text}
            reasoning, calls = None, [TextCall(text, status="invalid_json")]
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = message_calls(calls, turn_index)
        return message


class Conversation:
    """Conversation in which every turn is its own message: `[system, user, assistant, user, assistant, …]`."""

    def __init__(self, codec: Codec, messages: list[Message], tools: list[dict[str, Any]] | None = None):
        self.codec, self.tools = codec, tools
        self.opening = list(messages)
        self.observation: list[Message] = list(messages)
        """The messages after the last turn; before the first turn, the opening messages."""
        self.prompt_ids: list[int] = codec.render(self.opening, tools)
        """The whole context of the next turn."""
        self.turns: list[Turn] = []
        self._messages: list[Message] = []
        """The messages of the context up to the last turn."""
        self._sampled_after: list[int] = []
        """The whole context of the last turn."""
        self._new_ids: list[int] = self.prompt_ids
        self._break: str | None = None

    @property
    def prompt(self) -> list[int]:
        return self.prompt_ids

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt_ids)

    def add_action(self, generation: Generation) -> Turn:
        """Append the turn that the engine sampled after `prompt_ids`."""
        ids = generation.token_ids
        turn = Turn(
            observation_ids=self._new_ids,
            action_ids=list(ids),
            action_logprobs=list(generation.logprobs),
            version_spans=list(generation.version_spans),
            finish=generation.finish,
            text=self.codec.decode(self.codec.without_stop(ids)),
            message=self.codec.parse(ids, self.prompt_ids, self.tools, len(self.turns)),
            observation=self.observation,
            break_reason=self._break,
            experts=before_last_tokens(generation.experts, len(self._new_ids) + len(ids)),
        )
        self.turns.append(turn)
        self._messages += [*self.observation, turn.message]
        self._sampled_after = self.prompt_ids
        return turn

    def add_observation(self, messages: list[Message]) -> None:
        """Append the environment's messages; `prompt_ids` becomes the context of the next turn. A second call after the
        same turn replaces the messages of the first."""
        self.observation = messages
        extended = self._extend(self._sampled_after, self.turns[-1].action_ids, messages)
        rendered = self.codec.render([*self._messages, *messages], self.tools) if extended is None else extended
        if not self._continue(rendered):
            previous = self._sampled_after + self.turns[-1].action_ids
            self._break = "template" if extended is None else classify_break(previous, rendered, self.codec)

    def fold(self, exchanges: Sequence[tuple[Turn, list[Message]]]) -> None:
        """Replace everything after the opening messages by `exchanges`: turns that stay, each with the messages after
        it. The ids of these turns stay as they were sampled. The next turn is a break, unless its context still extends
        the tokens of the last turn."""
        messages, rendered = list(self.opening), self.codec.render(self.opening, self.tools)
        for turn, observation in exchanges:
            self._messages = [*messages, turn.message]
            messages = [*self._messages, *observation]
            extended = self._extend(rendered, turn.action_ids, observation)
            rendered = self.codec.render(messages, self.tools) if extended is None else extended
        self.observation = exchanges[-1][1]
        if not self._continue(rendered):
            self._break = "fold"

    def _continue(self, rendered: list[int]) -> bool:
        """Make `rendered` the context of the next turn. Return whether it extends the tokens of the last turn."""
        previous = self._sampled_after + self.turns[-1].action_ids
        extends = rendered[: len(previous)] == previous
        self.prompt_ids, self._break = rendered, None
        self._new_ids = rendered[len(previous) :] if extends else rendered
        return extends

    def _extend(self, prompt_ids: list[int], action_ids: list[int], messages: list[Message]) -> list[int] | None:
        """Return the context after `messages` answered a turn; None if all messages must be rendered again."""
        return self.codec.extend(prompt_ids, action_ids, messages, self.tools)


class SingleMessageConversation(Conversation):
    """Conversation with all turns inside one assistant message: `[system, user, assistant (multi-turn content)]`.

    Observations are encoded raw, without the template. The end-of-turn token of every turn but the last is removed from
    the context, so it is not trained either. A turn without a sampled end-of-turn token gets none.
    """

    def _extend(self, prompt_ids: list[int], action_ids: list[int], messages: list[Message]) -> list[int]:
        self.codec.check_images(messages)
        text = "".join(content_text(message.get("content")) for message in messages)
        return prompt_ids + action_ids + self.codec.encode(self.codec.control.escape(text))

    def add_observation(self, messages: list[Message]) -> None:
        self._drop_stop(self.turns[-1])
        super().add_observation(messages)

    def _drop_stop(self, turn: Turn) -> None:
        length = len(self.codec.without_stop(turn.action_ids))
        if length == len(turn.action_ids):
            return
        turn.action_ids, turn.action_logprobs = turn.action_ids[:length], turn.action_logprobs[:length]
        turn.experts = first_rows(turn.experts, len(turn.observation_ids) + length)
        turn.metrics["dropped_stop_tokens"] = 1.0
        version, count = turn.version_spans[-1]
        turn.version_spans = [*turn.version_spans[:-1], *([(version, count - 1)] if count > 1 else [])]


def classify_break(previous: list[int], extended: list[int], codec: Codec) -> str:
    """Classify why `extended` does not begin with `previous`: retoken (same text, other ids), edited (other text, not
    fewer tokens) or other."""
    before = codec.tokenizer.decode(previous, skip_special_tokens=False)
    after = codec.tokenizer.decode(extended, skip_special_tokens=False)
    if after.startswith(before):
        return "retoken"
    return "edited" if len(extended) >= len(previous) else "other"
