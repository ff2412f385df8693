"""Stop strings: whether the newest token of a row completes one."""

from __future__ import annotations

from functools import lru_cache
from typing import Any


class StopStrings:
    """Asked after every token of every row, and mostly answered by what the newest token says on its own."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self.may_complete = lru_cache(maxsize=None)(self._may_complete)

    def _may_complete(self, token_id: int, texts: tuple[str, ...]) -> bool:
        """Whether a token can be the last of one of `texts`: it has its last character, or hides what it has."""
        word = self._decode([token_id])
        # A part of a character decodes as U+FFFD, and some tokenizers drop spaces at the ends of a text.
        return "\ufffd" in word or any(text[-1:] in word or text[-1:].isspace() for text in texts)

    def complete(self, token_ids: list[int], texts: tuple[str, ...]) -> bool:
        """Whether the text of the newest tokens, at least `span(texts)` where there are so many, has one of `texts`."""
        text = self._decode(token_ids)
        return any(stop in text for stop in texts)

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)


def span(texts: tuple[str, ...]) -> int:
    """A stop string of n characters lies within n tokens plus the bytes of a split character before them."""
    return max(map(len, texts)) + 4
