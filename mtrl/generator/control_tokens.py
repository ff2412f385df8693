"""Control tokens that somebody wrote as text: words of a conversation must not become its structure.

A tool's output that holds `<|im_end|>` would else be encoded as the end of its message, and what follows as a turn that
the model never took. Templates that mark turns by plain words, such as `[/INST]` or `ASSISTANT:`, have the same need.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from mtrl.types import Message

SAYINGS = ("mtrlfirst", "mtrlsecond", "mtrlthird")
"""Contents of a conversation from which the words of a template are read."""
SHORTEST_MARKER = 3
"""Characters; shorter ones are punctuation that every text has."""


class ControlTokens:
    """The special tokens of a tokenizer, and the words by which its template marks turns, as they look in a text."""

    def __init__(self, tokenizer: Any):
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        special = {str(token) for token in added if token.special} | set(getattr(tokenizer, "all_special_tokens", ()))
        written = {token for token in special if len(token) > 1} | turn_markers(tokenizer, special)
        tokens = sorted(map(re.escape, written), key=len, reverse=True)
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


def turn_markers(tokenizer: Any, special: Collection[str]) -> set[str]:
    """What a chat template writes between messages without a special token; nothing where there is no template."""
    if not getattr(tokenizer, "chat_template", None):
        return set()
    roles = ("user", "assistant", "user")
    messages = [{"role": role, "content": content} for role, content in zip(roles, SAYINGS, strict=True)]
    try:
        text = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    except Exception:  # code of whoever wrote the template, which may refuse such a conversation in any way
        return set()
    between = re.split("|".join(SAYINGS), text)[1:]
    markers = {part.strip() for part in between if not any(token in part for token in special)}
    return {marker for marker in markers if len(marker) >= SHORTEST_MARKER}
