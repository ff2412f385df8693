"""Detection of the stop strings of a turn."""

from __future__ import annotations

from functools import lru_cache
from typing import Any


class StopStrings:
    """Detects stop strings. The test runs after every token of every row; the text of the newest token alone mostly
    decides it, and that result is cached."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self.may_complete = lru_cache(maxsize=None)(self._may_complete)

    def _may_complete(self, token_id: int, texts: tuple[str, ...]) -> bool:
        """Whether a token can be the last token of one of `texts`: its text contains the last character of the stop
        string, or cannot be determined from the token alone."""
        word = self._decode([token_id])
        # A part of a character decodes to U+FFFD, and some tokenizers drop spaces at the ends of a text.
        return "\ufffd" in word or any(text[-1:] in word or text[-1:].isspace() for text in texts)

    def complete(self, token_ids: list[int], texts: tuple[str, ...]) -> bool:
        """Whether the newest token completes one of `texts`. `token_ids` are the last `span(texts)` tokens, or all
        tokens if there are fewer."""
        text = self._decode(token_ids)
        if not any(stop in text for stop in texts):
            return False
        # Without the tokens before them, bytes that are no character together may be one: an earlier match is not real.
        before = self._decode(token_ids[:-1])
        pairs = enumerate(zip(before, text, strict=False))
        known = next((place for place, (old, new) in pairs if old != new), min(len(before), len(text)))
        return any(stop in text[max(0, known - len(stop) + 1) :] for stop in texts)

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)


def span(texts: tuple[str, ...]) -> int:
    """Return the number of newest tokens that can contain a stop string of `texts`: a string of n bytes in UTF-8 lies
    within n tokens, since a token may be one byte, plus the bytes of a split character before them."""
    return max(len(text.encode()) for text in texts) + 4
