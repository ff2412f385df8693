"""Text to ids and back with nothing around it, for conversations and renderers: they ask thousands of times a step."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

SHORT = 64
"""Characters; what is not longer is mostly what templates write, again and again, and is kept."""


class PlainTokenizer:
    """A fast tokenizer of Hugging Face's with `encode` and `decode` straight from its backend; all else is its own.

    Hugging Face's look at every id in Python, and set up padding and truncation for every word. `renderers` does not
    take this one for an `OffsetTokenizer`: it then leaves out which tokens are a message's content, which nothing here
    reads and which costs as much as the ids. Ids and texts are the same, in all renderers.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer, self._backend = tokenizer, tokenizer.backend_tokenizer
        self._kept = lru_cache(maxsize=4096)(lambda text: tuple(self._ids(text)))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # `__call__` above all, by which `renderers` tells an `OffsetTokenizer`
            raise AttributeError(name)
        return getattr(self._tokenizer, name)

    def __len__(self) -> int:
        """Ids of the vocabulary, those that were added among them; Python looks for it past `__getattr__`."""
        return len(self._tokenizer)

    def encode(self, text: str, add_special_tokens: bool = True, **options: Any) -> list[int]:
        """As the tokenizer's own."""
        if add_special_tokens or options or self._pads():
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens, **options)
        return list(self._kept(text)) if len(text) <= SHORT else self._ids(text)

    def decode(self, token_ids: Any, skip_special_tokens: bool = False, **options: Any) -> str:
        """As the tokenizer's own."""
        if options or not isinstance(token_ids, list):
            return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens, **options)
        return self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def _ids(self, text: str) -> list[int]:
        return self._backend.encode(text, add_special_tokens=False).ids

    def _pads(self) -> bool:
        """Whether a call of somebody else's has left the backend padding or cutting."""
        return self._backend.padding is not None or self._backend.truncation is not None


def plain(tokenizer: Any) -> Any:
    """The tokenizer as a `PlainTokenizer`; itself where it does anything else than its backend."""
    from transformers import PreTrainedTokenizerFast

    kind = type(tokenizer)
    own = ("encode", "_encode_plus", "decode", "_decode")
    if not isinstance(tokenizer, PreTrainedTokenizerFast) or any(
        getattr(kind, name) is not getattr(PreTrainedTokenizerFast, name) for name in own
    ):
        return tokenizer
    if tokenizer.clean_up_tokenization_spaces or tokenizer.split_special_tokens:
        return tokenizer
    return PlainTokenizer(tokenizer)
