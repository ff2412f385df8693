"""Encoders: they map texts to vectors of length 1, so that the inner product of two vectors is a cosine."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from mtrl.errors import UserError
from mtrl.retrieval.bm25 import words_of
from mtrl.retrieval.retriever import checked_options

_BUCKETS = 2**18
"""Size of the table in which the hashing encoder counts the passages per feature, in rows."""


class Encoder(Protocol):
    """Maps texts to vectors: float32 [texts, dimension], with rows of length 1, or 0 for a text without features.

    After `fit` it may be called from many threads at once.
    """

    def fit(self, passages: Sequence[str]) -> None:
        """Compute the corpus statistics that the encoder needs, before anything is encoded."""

    def encode_passages(self, passages: Sequence[str]) -> np.ndarray:
        """Return the vectors of passages; a passage's vector does not depend on the order."""
        ...

    def encode_queries(self, queries: Sequence[str]) -> np.ndarray:
        """Return the vectors of queries; a query's vector does not depend on the other queries."""
        ...

    @property
    def fingerprint(self) -> str:
        """Text that is equal for encoders that give equal vectors once they are fitted on the same corpus."""
        ...

    @property
    def state(self) -> dict[str, np.ndarray]:
        """Result of `fit`, which `restore` takes."""
        ...

    def restore(self, state: dict[str, np.ndarray]) -> None:
        """Set the state, instead of `fit`."""


def make_encoder(name: str, **options: Any) -> Encoder:
    """Make the encoder of a name: "hashing", or the folder or Hub name of a transformers encoder.

    Raises:
        UserError: an option is unknown, or the model does not exist.
    """
    if name == "hashing":
        return HashingEncoder(**checked_options("encoder hashing", HashingEncoder, options))
    from mtrl.retrieval.sentences import SentenceEncoder

    return SentenceEncoder(name, **checked_options(f"encoder {name}", SentenceEncoder, options))


class HashingEncoder:
    """Words and their character n-grams, hashed to a fixed number of dimensions and weighted by rarity.

    Feature hashing with signs (Weinberger et al. 2009, https://arxiv.org/abs/0902.2206). A feature that occurs tf
    times, and in df of the N passages, has the weight `(1 + log tf) * log((1 + N) / df)`; one that is not in the corpus
    has weight 0. The encoder needs no model, and finds other forms of a word through n-grams, but ignores meaning.

    Args:
        dimension: dimension of the vectors.
        ngrams: lengths of the shortest and longest n-gram of a word, which is marked at both ends.
        ngram_weight: weight of an n-gram relative to a word; 0: only words.
    """

    def __init__(self, dimension: int = 4096, ngrams: tuple[int, int] = (4, 5), ngram_weight: float = 0.3):
        if dimension < 1 or len(ngrams) != 2 or not 1 <= ngrams[0] <= ngrams[1] or not ngram_weight >= 0:
            raise UserError(
                f"encoder hashing: dimension={dimension} must be at least 1, ngrams={list(ngrams)} two sizes in order, "
                f"ngram_weight={ngram_weight} at least 0"
            )
        self.dimension, self.ngrams, self.ngram_weight = dimension, (ngrams[0], ngrams[1]), ngram_weight
        self._idf = np.zeros(_BUCKETS, np.float32)
        self._features_of_word = functools.lru_cache(2**16)(self._hashed)

    def fit(self, passages: Sequence[str]) -> None:
        counts = np.zeros(_BUCKETS, np.int64)
        for passage in passages:
            counts[np.unique(self._bucket(self._features(passage)))] += 1
        self._idf = np.where(counts > 0, np.log((1 + len(passages)) / np.maximum(counts, 1)), 0).astype(np.float32)

    def encode_passages(self, passages: Sequence[str]) -> np.ndarray:
        vectors = np.empty((len(passages), self.dimension), np.float32)
        for row, passage in zip(vectors, passages, strict=True):
            row[:] = self._encode(passage)
        return vectors

    encode_queries = encode_passages

    @property
    def fingerprint(self) -> str:
        return json.dumps(["hashing", 1, self.dimension, self.ngrams, self.ngram_weight])

    @property
    def state(self) -> dict[str, np.ndarray]:
        return {"idf": self._idf}

    def restore(self, state: dict[str, np.ndarray]) -> None:
        self._idf = state["idf"]

    def _encode(self, text: str) -> np.ndarray:
        features, counts = np.unique(self._features(text), return_counts=True)
        weights = (1 + np.log(counts)) * self._idf[self._bucket(features)]
        weights *= np.where(features & 1, 1.0, self.ngram_weight)
        signs = np.where(features >> np.uint64(63), 1.0, -1.0)
        dimensions = (features >> np.uint64(20)) % np.uint64(self.dimension)
        vector = np.bincount(dimensions.astype(np.int64), weights * signs, self.dimension)
        return vector / (np.sqrt((vector * vector).sum()) or 1.0)

    def _features(self, text: str) -> np.ndarray:
        """Return the features of a text with repetitions, as uint64 hashes."""
        return np.concatenate([np.empty(0, np.uint64), *map(self._features_of_word, words_of(text))])

    def _hashed(self, word: str) -> np.ndarray:
        """Return the features of a word: the word itself, marked by the lowest bit, and its n-grams."""
        marked = f"<{word}>"
        sizes = range(self.ngrams[0], self.ngrams[1] + 1) if self.ngram_weight else ()
        ngrams = [marked[start : start + size] for size in sizes for start in range(len(marked) - size + 1)]
        return np.array([_hash(word) | 1, *(_hash(ngram) & ~1 for ngram in ngrams)], np.uint64)

    @staticmethod
    def _bucket(features: np.ndarray) -> np.ndarray:
        return (features >> np.uint64(1)) % np.uint64(_BUCKETS)


def _hash(text: str) -> int:
    """Return a 64-bit hash that is the same in every process, unlike Python's own."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).digest(), "little")
