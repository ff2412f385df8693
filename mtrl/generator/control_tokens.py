"""Control tokens that occur as plain text: the text of a message must not change the structure of the conversation.

Without this module, a tool's output that contains `<|im_end|>` would be encoded as the end of its message, and the text
after it as a turn that the model never took. Templates that mark turns by plain words, such as `[/INST]` or
`ASSISTANT:`, need the same protection.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from mtrl.types import Message

SAYINGS = ("mtrlfirst", "mtrlsecond", "mtrlthird")
"""Message contents of a probe conversation; the text between them in the rendered probe is the template's own."""
SHORTEST_MARKER = 3
"""Minimum length of a turn marker, in characters; shorter ones are punctuation that every text has."""


class ControlTokens:
    """The special tokens of a tokenizer and the words by which its template marks turns, in their text form."""

    def __init__(self, tokenizer: Any):
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        special = {str(token) for token in added if token.special} | set(getattr(tokenizer, "all_special_tokens", ()))
        written = {token for token in special if len(token) > 1} | turn_markers(tokenizer, special)
        tokens = sorted(map(re.escape, written), key=len, reverse=True)
        self._written = re.compile("|".join(tokens)) if tokens else None

    def apart(self, text: str) -> str:
        """Return the text with a space in every control token (`< |im_end|>`), so that it is not encoded as one."""
        if self._written is None:
            return text
        return self._written.sub(lambda found: f"{found[0][0]} {found[0][1:]}", text)

    def apart_in(self, messages: list[Message]) -> list[Message]:
        """Return copies of the messages in which `apart` is applied to every text except the role."""
        if self._written is None:
            return messages
        return [{key: value if key == "role" else self._walk(value) for key, value in m.items()} for m in messages]

    def _walk(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.apart(value)
        if isinstance(value, dict):
            return {key: self._walk(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._walk(item) for item in value]
        return value


def turn_markers(tokenizer: Any, special: Collection[str]) -> set[str]:
    """Return the texts without a special token that a chat template writes between messages.

    The set is empty if the tokenizer has no template, or if the template cannot render the probe conversation.
    """
    if not getattr(tokenizer, "chat_template", None):
        return set()
    roles = ("user", "assistant", "user")
    messages = [{"role": role, "content": content} for role, content in zip(roles, SAYINGS, strict=True)]
    try:
        text = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    except Exception:  # a template is foreign code, which may refuse the conversation with any exception
        return set()
    between = re.split("|".join(SAYINGS), text)[1:]
    markers = {part.strip() for part in between if not any(token in part for token in special)}
    return {marker for marker in markers if len(marker) >= SHORTEST_MARKER}
