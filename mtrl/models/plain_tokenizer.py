"""A tokenizer with little overhead per call, for conversations and renderers, which call it thousands of times a
step."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

SHORT = 64
"""Maximum length of texts whose ids are cached, in characters. Such texts are mostly from templates, and recur."""


class PlainTokenizer:
    """Wrapper of a fast Hugging Face tokenizer whose `encode` and `decode` call the backend directly. All other
    attributes are delegated.

    Hugging Face's own methods process every id in Python, and set up padding and truncation for every text. `renderers`
    does not recognise this class as an `OffsetTokenizer`, so it does not compute which tokens are the content of a
    message; mtrl does not use that, and it costs as much as the ids. Ids and texts are the same in all renderers.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer, self._backend = tokenizer, tokenizer.backend_tokenizer
        self._cached_ids = lru_cache(maxsize=4096)(lambda text: tuple(self._ids(text)))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # in particular `__call__`, by which `renderers` recognises an `OffsetTokenizer`
            raise AttributeError(name)
        return getattr(self._tokenizer, name)

    def __len__(self) -> int:
        """Return the size of the vocabulary, including added tokens. Python does not look up `__len__` through
        `__getattr__`, so it is defined here."""
        return len(self._tokenizer)

    def encode(self, text: str, add_special_tokens: bool = True, **options: Any) -> list[int]:
        """Return the same ids as the tokenizer's own method."""
        if add_special_tokens or options or self._pads():
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens, **options)
        return list(self._cached_ids(text)) if len(text) <= SHORT else self._ids(text)

    def decode(self, token_ids: Any, skip_special_tokens: bool = False, **options: Any) -> str:
        """Return the same text as the tokenizer's own method."""
        if options or not isinstance(token_ids, list):
            return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens, **options)
        return self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def _ids(self, text: str) -> list[int]:
        return self._backend.encode(text, add_special_tokens=False).ids

    def _pads(self) -> bool:
        """Return whether another caller has left padding or truncation enabled in the backend."""
        return self._backend.padding is not None or self._backend.truncation is not None


def plain(tokenizer: Any) -> Any:
    """Wrap the tokenizer in a `PlainTokenizer`; return it unchanged if its results can differ from its backend's."""
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
