"""Retrieval: passages of a corpus for the queries of an agent, in this process or from a server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mtrl.errors import UserError
from mtrl.retrieval.corpus import load_corpus
from mtrl.retrieval.passage import Passage
from mtrl.retrieval.retriever import Hit, Retriever, RetrieverError, checked_options

__all__ = ["Hit", "Passage", "Retriever", "RetrieverError", "load_corpus", "make_retriever"]

KINDS = ("bm25", "dense", "server")


def make_retriever(
    kind: str, passages: Sequence[Passage] | None = None, url: str | None = None, **options: Any
) -> Retriever:
    """Make a retriever of a kind.

    Args:
        kind: "bm25" and "dense" search `passages` in this process, "server" asks the retriever server at `url`.
        options: see `BM25Retriever`, `DenseRetriever` (extra [search]) and `ServerRetriever`.

    Raises:
        UserError: the kind or an option does not exist, or the passages or the URL are missing or superfluous.
    """
    if kind not in KINDS:
        raise UserError(f"retriever={kind!r} does not exist; choose one of {', '.join(KINDS)}")
    needed, other = ("url", "passages") if kind == "server" else ("passages", "url")
    given = {"passages": passages, "url": url}
    if given[needed] is None:
        raise UserError(f"retriever={kind} needs {needed}; give it, or choose another retriever")
    if given[other] is not None:
        raise UserError(f"retriever={kind} makes no use of {other}; leave it out, or choose another retriever")
    constructor = _constructor(kind)
    return constructor(given[needed], **checked_options(f"retriever={kind}", constructor, options))


def _constructor(kind: str) -> Callable[..., Retriever]:
    if kind == "bm25":
        from mtrl.retrieval.bm25 import BM25Retriever

        return BM25Retriever
    if kind == "dense":
        from mtrl.retrieval.dense import DenseRetriever

        return DenseRetriever
    from mtrl.retrieval.client import ServerRetriever

    return ServerRetriever
