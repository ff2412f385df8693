"""What finds passages: the interface, and what all kinds do with a query."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from mtrl.retrieval.passage import Passage

LONGEST_QUERY = 4096
"""Characters; what follows is not read. Longer than any question, and short enough to be cheap from a hostile model."""


@dataclass(frozen=True)
class Hit:
    """A passage that was found. Scores of different retrievers have different units; more is better in all."""

    passage: Passage
    score: float


class Retriever(Protocol):
    """Finds passages for queries. Safe to call from many threads at once."""

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """One list per query, best first, of at most `topk` hits; equal scores in the order of the corpus.

        A query's hits do not depend on the queries beside it. A blank query has none.

        Raises:
            ValueError: `topk` is less than 1, or `queries` is one text.
            RetrieverError: the retriever failed; never because of what a query says.
        """
        ...


class RetrieverError(RuntimeError):
    """A retriever did not answer."""


def clean_queries(queries: Sequence[str], topk: int) -> list[str]:
    """The queries as every kind reads them: valid text, not longer than `LONGEST_QUERY`, without blanks around.

    Raises:
        ValueError: `topk` is less than 1, or `queries` is one text.
    """
    if isinstance(queries, str):
        raise ValueError("queries is one text; give a list of texts")
    if topk < 1:
        raise ValueError(f"topk={topk} must be at least 1")
    return [query[:LONGEST_QUERY].encode("utf-8", "replace").decode().strip() for query in queries]
