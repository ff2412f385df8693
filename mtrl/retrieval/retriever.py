"""The interface of retrievers, and the checks of queries and options that all kinds share."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mtrl.errors import BackendError, UserError
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


class RetrieverError(BackendError):
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


def checked_options(what: str, function: Callable[..., Any], options: dict[str, Any]) -> dict[str, Any]:
    """Return the options, if `function` takes them all. Only parameters with a default are options.

    Args:
        what: start of the error message, such as "retriever=bm25".

    Raises:
        UserError: an option does not exist.
    """
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return options  # the function checks them itself
    allowed = [parameter.name for parameter in parameters if parameter.default is not parameter.empty]
    if unknown := sorted(options.keys() - set(allowed)):
        raise UserError(f"{what} has no option {unknown[0]!r}; it has {', '.join(allowed)}")
    return options
