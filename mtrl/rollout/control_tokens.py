"""Control tokens in the text of a message or of a tool's schema: the words of a conversation must not become its
structure.

A tool's output that holds `<|im_end|>` would otherwise be encoded as the end of its message, and the text after it as
a turn that the model never took. Templates that mark turns by plain words, such as `[/INST]` or `ASSISTANT:`, have the
same need. In a message of a tool, added tokens of the template such as `</tool_response>` are structure too.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any

from mtrl.types import Message

PROBE_CONTENTS = ("mtrlfirst", "mtrlsecond", "mtrlthird")
"""Message contents of a probe conversation; the text between them in the rendered probe is the template's own."""
SHORTEST_MARKER = 3
"""Minimum length of a turn marker, in characters; shorter ones are punctuation that every text has."""

MAX_PASSES = 8
"""Maximum number of passes over a text. One is enough unless control tokens overlap, as `###` in `####`, where the rest
of a token and the characters after it are a token too."""


class ControlTokens:
    """The special tokens of a tokenizer and the words by which its template marks turns, in their text form."""

    def __init__(self, tokenizer: Any):
        added = list(getattr(tokenizer, "added_tokens_decoder", {}).values())
        special = {str(token) for token in added if token.special} | set(getattr(tokenizer, "all_special_tokens", ()))
        control_texts = special | turn_markers(tokenizer, special)
        template = str(getattr(tokenizer, "chat_template", None) or "")
        self._pattern = _any_of(control_texts)
        # Some tokenizers have added tokens of spaces alone, which are no structure.
        written = {str(token) for token in added if str(token) in template and not str(token).isspace()}
        self._tool_pattern = _any_of(control_texts | written)

    def escape(self, text: str) -> str:
        """Return the text with a space in every control token (`< |im_end|>`), so that it is not encoded as one."""
        return _escape(text, self._pattern)

    def escape_messages(self, messages: list[Message]) -> list[Message]:
        """Return copies of the messages in which control tokens of every text except the role have a space."""
        return [self._escape_message(message) for message in messages]

    def escape_tools(self, tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
        """Return copies of the schemas of tools in which control tokens of every text have a space. The schemas come
        from programs and from MCP servers, and the template writes them into the context."""
        return tools if self._pattern is None else _escape_value(tools, self._pattern, joins_parts=False)

    def _escape_message(self, message: Message) -> Message:
        pattern = self._tool_pattern if message.get("role") == "tool" else self._pattern
        if pattern is None:
            return message
        return {key: value if key == "role" else _escape_value(value, pattern) for key, value in message.items()}


def _any_of(tokens: Collection[str]) -> re.Pattern[str] | None:
    """Return a pattern that matches any of the tokens, the longest first; None without tokens."""
    ordered = sorted((token for token in tokens if len(token) > 1), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered))) if ordered else None


def _escape(text: str, pattern: re.Pattern[str] | None) -> str:
    if pattern is None:
        return text
    for _ in range(MAX_PASSES):
        text, count = pattern.subn(lambda found: f"{found[0][0]} {found[0][1:]}", text)
        if not count:
            break
    return text


def _escape_value(value: Any, pattern: re.Pattern[str], joins_parts: bool = True) -> Any:
    """Return a copy of the value in which control tokens of every text have a space, keys of mappings included, since a
    template may write them.

    Args:
        joins_parts: whether consecutive text parts become one part, since a token may be split between the parts of a
            message.
    """
    if isinstance(value, str):
        return _escape(value, pattern)
    if isinstance(value, dict):
        return {_escape_value(k, pattern): _escape_value(item, pattern, joins_parts) for k, item in value.items()}
    if isinstance(value, list | tuple):
        return [_escape_value(item, pattern, joins_parts) for item in (_joined(value) if joins_parts else value)]
    return value


def _joined(parts: Sequence[Any]) -> list[Any]:
    """Return the parts of a message's content, with consecutive text parts joined."""
    joined: list[Any] = []
    for part in parts:
        if _is_text(part) and joined and _is_text(joined[-1]):
            joined[-1] = {**joined[-1], "text": joined[-1]["text"] + part["text"]}
        else:
            joined.append(part)
    return joined


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def turn_markers(tokenizer: Any, special: Collection[str]) -> set[str]:
    """Return the plain texts by which a chat template marks turns.

    They are the texts that it writes between two messages. Where it writes special tokens there as well, a text beside
    them counts only if it does not begin like a word: `[INST]` does, the `assistant` of ChatML does not. The set is
    empty if the tokenizer has no template, or if the template cannot render the probe conversation.
    """
    if not getattr(tokenizer, "chat_template", None):
        return set()
    roles = ("user", "assistant", "user")
    messages = [{"role": role, "content": content} for role, content in zip(roles, PROBE_CONTENTS, strict=True)]
    try:
        text = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    except Exception:  # a template is foreign code, which may refuse the conversation with any exception
        return set()
    tokens = _any_of(special)
    markers: set[str] = set()
    for between in re.split("|".join(PROBE_CONTENTS), text)[1:]:
        words = [word.strip() for word in (tokens.split(between) if tokens else [between])]
        markers.update(word for word in words if len(words) == 1 or not word[:1].isalnum())
    return {marker for marker in markers if len(marker) >= SHORTEST_MARKER}
