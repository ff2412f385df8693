"""The interface of retrievers, and the preparation of queries that all kinds share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from mtrl.retrieval.passage import Passage

LONGEST_QUERY = 4096
"""Maximum length of a query in characters; the rest is ignored. It exceeds any question, and bounds the cost of a
hostile model's queries."""


@dataclass(frozen=True)
class Hit:
    """A passage that was found. Scores of different retrievers have different units; higher is always better."""

    passage: Passage
    score: float


class Retriever(Protocol):
    """Finds passages for queries. It may be called from many threads at once."""

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """Return one list per query, best first, of at most `topk` hits; equal scores are in the order of the corpus.

        A query's hits do not depend on the other queries. A blank query has no hits.

        Raises:
            ValueError: `topk` is less than 1, or `queries` is one text.
            RetrieverError: the retriever failed. No text of a query causes this.
        """
        ...


class RetrieverError(RuntimeError):
    """A retriever did not answer."""


def clean_queries(queries: Sequence[str], topk: int) -> list[str]:
    """Return the queries as valid text, cut to `LONGEST_QUERY` characters and without surrounding blanks.

    Raises:
        ValueError: `topk` is less than 1, or `queries` is one text.
    """
    if isinstance(queries, str):
        raise ValueError("queries is one text; give a list of texts")
    if topk < 1:
        raise ValueError(f"topk={topk} must be at least 1")
    return [query[:LONGEST_QUERY].encode("utf-8", "replace").decode().strip() for query in queries]
