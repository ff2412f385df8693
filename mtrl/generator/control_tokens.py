"""Control tokens that somebody wrote as text: words of a conversation must not become its structure.

A tool's output that holds `<|im_end|>` would else be encoded as the end of its message, and what follows as a turn that
the model never took.
"""

from __future__ import annotations

import re
from typing import Any

from mtrl.types import Message


class ControlTokens:
    """The special tokens of a tokenizer, as they look in a text."""

    def __init__(self, tokenizer: Any):
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        special = {str(token) for token in added if token.special} | set(getattr(tokenizer, "all_special_tokens", ()))
        tokens = sorted((re.escape(token) for token in special if len(token) > 1), key=len, reverse=True)
        self._written = re.compile("|".join(tokens)) if tokens else None

    def apart(self, text: str) -> str:
        """The text with a space in every control token, `< |im_end|>`: no tokenizer takes it for one then."""
        if self._written is None:
            return text
        return self._written.sub(lambda found: f"{found[0][0]} {found[0][1:]}", text)

    def apart_in(self, messages: list[Message]) -> list[Message]:
        """Copies of the messages with every text in them taken apart, but the role."""
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
