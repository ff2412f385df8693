"""BM25: passages that share rare words with the query, by bm25s (https://github.com/xhluca/bm25s)."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from mtrl.errors import UserError
from mtrl.retrieval.passage import Passage
from mtrl.retrieval.retriever import Hit, clean_queries


@contextmanager
def _without_jax() -> Iterator[None]:
    """Within this context, JAX cannot be imported, unless it was imported before."""
    if "jax" in sys.modules:
        yield
        return
    sys.modules["jax"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["jax"]


# bm25s calls JAX while it is imported, for a function that is not used here, and JAX then takes three quarters of the
# memory of a GPU.
with _without_jax():
    import bm25s
    from bm25s.stopwords import STOPWORDS_EN

logging.getLogger("bm25s").setLevel(logging.WARNING)  # bm25s sets it to DEBUG, and run logs would show its messages

_WORD = re.compile(r"\w+")


def words_of(text: str) -> list[str]:
    """Return the words of a text, in lower case and without stemming."""
    return _WORD.findall(text.lower())


class BM25Retriever:
    """Exact BM25 over title and text, in memory.

    The score is Lucene's, without its factor (k1 + 1): the sum over the query's words, including repetitions, of
    `log(1 + (N - n + 0.5) / (n + 0.5)) * tf / (tf + k1 * (1 - b + b * length / mean length))`, in float32.
    Passages without a word of the query are not hits.

    Args:
        k1: weight of repeated words of a passage.
        b: strength of the length normalisation, from 0 to 1.
        stopwords: words that are ignored in passages and queries; "english" is Lucene's short list.

    Raises:
        UserError: there are no passages, or a setting is out of range.
    """

    def __init__(
        self, passages: Sequence[Passage], k1: float = 1.2, b: float = 0.75, stopwords: str | Sequence[str] = ()
    ):
        if not passages:
            raise UserError("retriever bm25 has no passages; give a corpus with at least one")
        if not 0 < k1 < float("inf") or not 0 <= b <= 1:
            raise UserError(f"retriever bm25: k1={k1} must be more than 0, and b={b} from 0 to 1")
        self.passages = list(passages)
        self._stopwords = _stopwords(stopwords)
        self._ids: dict[str, int] = {}
        documents = [
            [self._ids.setdefault(word, len(self._ids)) for word in self._words(passage.contents)]
            for passage in self.passages
        ]
        # The backend is fixed, because "auto" uses numba if it is installed.
        self._index = bm25s.BM25(k1=k1, b=b, method="lucene", backend="numpy")
        if self._ids:
            self._index.index((documents, dict(self._ids)), create_empty_token=False, show_progress=False)

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        return [self._search(query, topk) for query in clean_queries(queries, topk)]

    def _search(self, query: str, topk: int) -> list[Hit]:
        known = [self._ids[word] for word in self._words(query) if word in self._ids]
        if not known:
            return []
        scores: np.ndarray[Any, Any] = self._index.get_scores_from_ids(known)
        if topk < len(scores):
            least = np.partition(scores, -topk)[-topk]
            found = np.flatnonzero((scores >= least) & (scores > 0))
        else:
            found = np.flatnonzero(scores > 0)
        best = found[np.argsort(-scores[found], kind="stable")[:topk]]
        return [Hit(self.passages[index], float(scores[index])) for index in best]

    def _words(self, text: str) -> list[str]:
        return [word for word in words_of(text) if word not in self._stopwords]


def _stopwords(stopwords: str | Sequence[str]) -> frozenset[str]:
    if stopwords == "english":
        return frozenset(STOPWORDS_EN)
    words = list(stopwords) if isinstance(stopwords, Iterable) and not isinstance(stopwords, str) else [None]
    if not all(isinstance(word, str) for word in words):
        raise UserError(f"retriever bm25: stopwords={stopwords!r} must be 'english' or a list of words")
    return frozenset(str(word).lower() for word in words)
