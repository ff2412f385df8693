"""Control tokens in the text of a message: the words of a conversation must not become its structure.

A tool's output that holds `<|im_end|>` would otherwise be encoded as the end of its message, and the text after it as
a turn that the model never took. Templates that mark turns by plain words, such as `[/INST]` or `ASSISTANT:`, have the
same need. In a message of a tool, added tokens of the template such as `</tool_response>` are structure too.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any

from mtrl.types import Message

SAYINGS = ("mtrlfirst", "mtrlsecond", "mtrlthird")
"""Contents of the messages from which the words of a template are read."""
SHORTEST_MARKER = 3
"""Length of the shortest marker, in characters; shorter ones are punctuation that every text has."""


class ControlTokens:
    """The special tokens of a tokenizer and the words by which its template marks turns, in their text form."""

    def __init__(self, tokenizer: Any):
        added = list(getattr(tokenizer, "added_tokens_decoder", {}).values())
        special = {str(token) for token in added if token.special} | set(getattr(tokenizer, "all_special_tokens", ()))
        written = special | turn_markers(tokenizer, special)
        template = str(getattr(tokenizer, "chat_template", None) or "")
        self._written = _any_of(written)
        self._written_by_tools = _any_of(written | {str(token) for token in added if str(token) in template})

    def apart(self, text: str) -> str:
        """The text with a space in every control token, `< |im_end|>`: no tokenizer takes it for one then."""
        return _apart(text, self._written)

    def apart_in(self, messages: list[Message]) -> list[Message]:
        """Copies of the messages with every text in them taken apart, but the role."""
        return [self._apart_message(message) for message in messages]

    def _apart_message(self, message: Message) -> Message:
        pattern = self._written_by_tools if message.get("role") == "tool" else self._written
        if pattern is None:
            return message
        return {key: value if key == "role" else _walk(value, pattern) for key, value in message.items()}


def _any_of(tokens: Collection[str]) -> re.Pattern[str] | None:
    """A pattern that matches each of the tokens, the longest one first."""
    ordered = sorted((token for token in tokens if len(token) > 1), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered))) if ordered else None


def _apart(text: str, pattern: re.Pattern[str] | None) -> str:
    if pattern is None:
        return text
    return pattern.sub(lambda found: f"{found[0][0]} {found[0][1:]}", text)


def _walk(value: Any, pattern: re.Pattern[str]) -> Any:
    """A copy of the value with every text in it taken apart, keys of mappings included, for a template may write them.
    Texts that stand side by side in a list become one, since a token may be split between them."""
    if isinstance(value, str):
        return _apart(value, pattern)
    if isinstance(value, dict):
        return {_walk(key, pattern): _walk(item, pattern) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_walk(item, pattern) for item in _joined(value)]
    return value


def _joined(parts: Sequence[Any]) -> list[Any]:
    """The parts of a message's content, each run of text parts as one part."""
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
    """The plain words by which a chat template marks turns; nothing where there is no template.

    They are what it writes between two messages. Where it writes special tokens there as well, those mark the turn, and
    of the words beside them only such count as do not begin like a word: `[INST]`, but not the `assistant` of ChatML.
    """
    if not getattr(tokenizer, "chat_template", None):
        return set()
    roles = ("user", "assistant", "user")
    messages = [{"role": role, "content": content} for role, content in zip(roles, SAYINGS, strict=True)]
    try:
        text = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    except Exception:  # the template is code of its author and may refuse such a conversation in any way
        return set()
    tokens = _any_of(special)
    markers: set[str] = set()
    for between in re.split("|".join(SAYINGS), text)[1:]:
        words = [word.strip() for word in (tokens.split(between) if tokens else [between])]
        markers.update(word for word in words if len(words) == 1 or not word[:1].isalnum())
    return {marker for marker in markers if len(marker) >= SHORTEST_MARKER}
