"""Renderers that the `renderers` package does not have: one for the tiny policy, and one for any chat template."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from renderers import DefaultRenderer, ParsedResponse, ParsedToolCall, RenderedTokens, create_renderer
from renderers.base import ToolCallParseStatus
from renderers.configs import DefaultRendererConfig, config_from_name

from mtrl.environments.tool_calls import describe_tools, parse_calls, text_of
from mtrl.errors import UserError
from mtrl.models.vision import PLACEHOLDER, START, STOP, processor_of
from mtrl.types import ROLES, Message, images_in
from mtrl.utils.images import content_text
from mtrl.utils.text import one_line

END = "<|end|>"
TINY_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}<|end|>{% endgeneration %}"
    "{% else %}{{ message['content'] }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""The tiny policy's chat template: one token opens a message, and one token closes it."""
TINY_VISION_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}<|end|>{% endgeneration %}"
    "{% else %}{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""The tiny policy's chat template for messages with images; one placeholder stands for each image."""


def make_renderer(tokenizer: Any, name: str = "auto", key: str = "model.renderer") -> Any:
    """Return the renderer for a tokenizer: the tiny policy's, one of the `renderers` package, or a `TemplateRenderer`.

    Args:
        key: setting that names the renderer, for error messages.

    Raises:
        UserError: `name` is unknown or for other tokenizers, or the tokenizer has no chat template.
    """
    if getattr(tokenizer, "chat_template", None) == TINY_TEMPLATE and name == "auto":
        return TinyRenderer(tokenizer)
    if processor_of(tokenizer) is not None:
        return make_image_renderer(tokenizer, name, key)
    if name == "auto":
        name = create_renderer(tokenizer).config.name
    if name == "default":
        if not getattr(tokenizer, "chat_template", None):
            raise UserError(
                f"the tokenizer of model.path={tokenizer.name_or_path} has no chat template; use a chat model"
            )
        return TemplateRenderer(tokenizer)
    try:
        kind = type(config_from_name(name))
    except (ValueError, KeyError) as error:
        raise UserError(f"{key}={name} is not known to the renderers package ({error}); use auto") from error
    try:
        # The reasoning of past turns stays in the context, as sampled; otherwise every user message would start a new
        # sample.
        return create_renderer(tokenizer, kind(thinking_retention="all"))
    except Exception as error:  # a renderer fails in its own way if the tokenizer lacks its tokens
        raise UserError(
            f"{key}={name} does not fit the tokenizer of the model ({one_line(error)}); use auto"
        ) from error


def make_image_renderer(tokenizer: Any, name: str, key: str = "model.renderer") -> Any:
    """Return the renderer for the tokenizer of a model that reads images.

    Args:
        key: see `make_renderer`.

    Raises:
        UserError: `name` is a renderer of the `renderers` package, or the tokenizer has no chat template.
    """
    if name not in ("auto", "default"):
        raise UserError(f"{key}={name} is not for models that read images; set {key}=auto")
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        raise UserError(f"the tokenizer of model.path={tokenizer.name_or_path} has no chat template; use a chat model")
    return TinyVisionRenderer(tokenizer) if template == TINY_VISION_TEMPLATE else TemplateRenderer(tokenizer)


class TinyRenderer:
    """Renders messages to ids without Jinja, to the same ids as `TINY_TEMPLATE` (a test compares them).

    Tool calls are text (mtrl/environments/tool_calls.py), and the content of a parsed message includes them, so that
    rendering the message again gives the same text. Descriptions of tools are not rendered, because the context is
    short; a family that needs them writes a short form into its prompts (`describe_tools`).
    """

    is_prefix_stable = True
    supports_tools = False

    def __init__(self, tokenizer: Any):
        self.role_ids = {role: tokenizer.convert_tokens_to_ids(f"<|{role}|>") for role in ROLES}
        self.end_id: int = tokenizer.convert_tokens_to_ids(END)
        self._tokenizer = tokenizer
        backend = tokenizer.backend_tokenizer
        self._encode = lru_cache(maxsize=65536)(lambda text: tuple(backend.encode(text, add_special_tokens=False).ids))

    def render_ids(
        self, messages: list[Message], *, tools: Any = None, add_generation_prompt: bool = False
    ) -> list[int]:
        ids: list[int] = []
        for message in messages:
            ids += [self.role_ids[message["role"]], *self._content_ids(message), self.end_id]
        return [*ids, self.role_ids["assistant"]] if add_generation_prompt else ids

    def _content_ids(self, message: Message) -> Sequence[int]:
        return self._encode(text_of(message))

    def render(
        self, messages: list[Message], *, tools: Any = None, add_generation_prompt: bool = False
    ) -> RenderedTokens:
        out = RenderedTokens(message_roles=[message["role"] for message in messages])
        for index, message in enumerate(messages):
            ids = self.render_ids([message])
            sampled = message["role"] == "assistant"
            out.token_ids += ids
            out.message_indices += [index] * len(ids)
            out.sampled_mask += [False, *[sampled] * (len(ids) - 1)]
        if add_generation_prompt:
            out.token_ids.append(self.role_ids["assistant"])
            out.message_indices.append(-1)
            out.sampled_mask.append(False)
        return out

    def parse_response(
        self, token_ids: list[int], *, tools: Any = None, prompt_ids: list[int] | None = None
    ) -> ParsedResponse:
        ids = token_ids[:-1] if token_ids and token_ids[-1] == self.end_id else token_ids
        text = self._tokenizer.decode(ids, skip_special_tokens=True)
        return ParsedResponse(content=text, tool_calls=_parsed_calls(text)[1] if tools else [])

    def get_stop_token_ids(self) -> list[int]:
        return [self.end_id]

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: list[Message],
        *,
        tools: Any = None,
    ) -> RenderedTokens:
        close = [] if previous_completion_ids[-1:] == [self.end_id] else [self.end_id]
        new = self.render_ids(new_messages, add_generation_prompt=True)
        return RenderedTokens(token_ids=[*previous_prompt_ids, *previous_completion_ids, *close, *new])


class TinyVisionRenderer(TinyRenderer):
    """Renders messages with images to the same ids as `TINY_VISION_TEMPLATE` (a test compares them)."""

    def __init__(self, tokenizer: Any):
        super().__init__(tokenizer)
        self._image = tokenizer.convert_tokens_to_ids([START, PLACEHOLDER, STOP])

    def _content_ids(self, message: Message) -> Sequence[int]:
        content = message.get("content")
        if not isinstance(content, list):
            return super()._content_ids(message)
        parts = (self._image if part["type"] == "image" else self._encode(content_text([part])) for part in content)
        return [token for part in parts for token in part]


def _parsed_calls(text: str) -> tuple[str, list[ParsedToolCall]]:
    content, calls = parse_calls(text)
    return content, [ParsedToolCall(c.raw, c.name, c.arguments, status=ToolCallParseStatus(c.status)) for c in calls]


_PROBE = "mtrlprobe"


class TemplateRenderer(DefaultRenderer):
    """Renderer for any Jinja chat template. It derives the ids that new messages add from short stand-in conversations.

    Where the template renders no tools, they are described in the system message. Where it renders no calls, they are
    text, and where it refuses or leaves out messages of a tool, they are messages of the user. Where it does not render
    the text of parts as it renders text, parts without images are joined to text. Calls are parsed in the text form
    (mtrl/environments/tool_calls.py), which most templates use; for a model with another form, set its renderer.

    Two stand-in conversations differ only in the single word of the assistant. So the common end of their ids is the
    closing token of the assistant's turn and everything after it, independent of the real conversation.
    """

    def __init__(self, tokenizer: Any):
        super().__init__(tokenizer, DefaultRendererConfig())
        self._reads_parts = self._text_of([{"type": "text", "text": _PROBE}]) == self._text_of(_PROBE)
        self._shows_calls = self._renders(_turn("", _PROBE))
        result = {"role": "tool", "content": _PROBE, "tool_call_id": "call_0_0"}
        self._shows_results = self._renders(_turn("y"), result) or self._renders(_turn("", "f"), result)
        special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        tail = self._after_assistant([{"role": "user", "content": "x"}]) or []
        self.close_id: int | None = next((i for i in tail if i in special), tokenizer.eos_token_id)
        """Id of the token that ends an assistant's turn; for base models it is not the tokenizer's `eos_token`."""

    def _apply(self, messages: list[Message], *, tools: Any = None, add_generation_prompt: bool = False) -> list[int]:
        if not self._reads_parts:
            messages = [_with_text(message) for message in messages]
        if not self._shows_calls:
            messages = [_turn(text_of(m)) if m.get("tool_calls") else m for m in messages]
        if not self._shows_results:
            messages = _with_results_of_user(messages)
        if tools and "tools" not in str(self._tokenizer.chat_template):
            messages, tools = _with_description(messages, describe_tools(tools)), None
        return super()._apply(messages, tools=tools, add_generation_prompt=add_generation_prompt)

    def parse_response(
        self, token_ids: list[int], *, tools: Any = None, prompt_ids: list[int] | None = None
    ) -> ParsedResponse:
        parsed = super().parse_response(token_ids, tools=tools, prompt_ids=prompt_ids)
        if tools:
            words, parsed.tool_calls = _parsed_calls(parsed.content)
            # If the template does not render tool calls, they stay in the content, as sampled.
            parsed.content = words if self._shows_calls else parsed.content
        return parsed

    def get_stop_token_ids(self) -> list[int]:
        return list(dict.fromkeys(i for i in (self.close_id, self._tokenizer.eos_token_id) if i is not None))

    def render(
        self, messages: list[Message], *, tools: Any = None, add_generation_prompt: bool = False
    ) -> RenderedTokens:
        """Render with the template; `sampled_mask` marks the tokens after the opening of each assistant's turn, up to
        its closing token.

        Raises:
            UserError: the template changes an assistant's turn when messages follow.
        """
        out = super().render(messages, tools=tools, add_generation_prompt=add_generation_prompt)
        out.sampled_mask = [False] * len(out.token_ids)
        for index in (i for i, message in enumerate(messages) if message["role"] == "assistant"):
            opening = self.render_ids(messages[:index], tools=tools, add_generation_prompt=True)
            until = self.render_ids(messages[: index + 1], tools=tools)
            start = next((i for i, (a, b) in enumerate(zip(opening, until, strict=False)) if a != b), len(opening))
            end = until.index(self.close_id, start) + 1 if self.close_id in until[start:] else len(until)
            if out.token_ids[:end] != until[:end]:
                raise UserError(
                    f"the chat template of {self._tokenizer.name_or_path} changes an assistant's turn when messages "
                    "follow, so it does not mark the trained tokens; name a renderer that does, such as qwen3"
                )
            out.sampled_mask[start:end] = [True] * (end - start)
        return out

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: list[Message],
        *,
        tools: Any = None,
    ) -> RenderedTokens | None:
        tail = self._after_assistant(new_messages, tools)
        if tail is None or self.close_id not in tail:
            return None
        new = tail[tail.index(self.close_id) + 1 :]
        closed = previous_completion_ids and previous_completion_ids[-1] in self.get_stop_token_ids()
        closing = [] if closed else [self.close_id]
        return RenderedTokens(token_ids=[*previous_prompt_ids, *previous_completion_ids, *closing, *new])

    def _renders(self, *messages: Message) -> bool:
        """Return whether the template renders the word `_PROBE` in messages that follow a question. Some templates name
        `tool_calls` and render no call of a message without text, or only one whose arguments are a string."""
        return _PROBE in self._text_of("x", *messages)

    def _text_of(self, content: Any, *messages: Message) -> str:
        """Return the text of a question with this content and of the messages that follow it; empty if the template
        raises."""
        try:
            return str(
                self._tokenizer.apply_chat_template([{"role": "user", "content": content}, *messages], tokenize=False)
            )
        except Exception:  # a template can raise Jinja's errors or any Python error
            return ""

    def _after_assistant(self, messages: list[Message], tools: Any = None) -> list[int] | None:
        """Return the ids from the end of an assistant's text to the end of the next generation prompt; None if the
        template raises."""
        try:
            first, second = (
                self.render_ids(
                    [{"role": "user", "content": "x"}, {"role": "assistant", "content": word}, *messages],
                    tools=tools,
                    add_generation_prompt=True,
                )
                for word in ("y", "z")
            )
        except Exception:  # a template can raise Jinja's errors or any Python error
            return None
        same = next((i for i, (a, b) in enumerate(zip(first[::-1], second[::-1], strict=False)) if a != b), 0)
        return first[len(first) - same :]


def _with_description(messages: list[Message], description: str) -> list[Message]:
    """Return the messages with the description of tools at the end of the system message, or in a new system
    message."""
    if not messages or messages[0]["role"] != "system":
        return [{"role": "system", "content": description}, *messages]
    return [{**messages[0], "content": f"{content_text(messages[0]['content'])}\n\n{description}"}, *messages[1:]]


def _with_text(message: Message) -> Message:
    """Return the message with the parts of its content joined to text; the message itself if one shows an image."""
    content = message.get("content")
    return (
        message
        if not isinstance(content, list) or images_in([message])
        else {**message, "content": content_text(content)}
    )


def _turn(content: str, call: str | None = None) -> Message:
    """Return a message of the assistant, with a call of the tool that `call` names."""
    calls = [{"type": "function", "id": "call_0_0", "function": {"name": call, "arguments": {}}}]
    return {"role": "assistant", "content": content} | ({"tool_calls": calls} if call else {})


def _with_results_of_user(messages: list[Message]) -> list[Message]:
    """Return the messages with those of tools as messages of the user. A result joins the message of the user or the
    result before it, and a message of the user joins a result, because the roles of such templates alternate."""
    out: list[Message] = []
    after_result = False
    for message in messages:
        is_result = message["role"] == "tool"
        if out and out[-1]["role"] == "user" and (is_result or (after_result and message["role"] == "user")):
            out[-1] = {"role": "user", "content": f"{text_of(out[-1])}\n\n{text_of(message)}"}
        else:
            out.append({"role": "user", "content": text_of(message)} if is_result else message)
        after_result = is_result
    return out
