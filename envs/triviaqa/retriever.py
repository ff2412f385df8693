"""The retriever of `wiki_search`: that of the episode that calls it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any

from envs.triviaqa import encyclopaedia
from mtrl.errors import UserError
from mtrl.retrieval import Passage, Retriever, load_corpus, make_retriever

SERVER: dict[str, Any] = {"timeout": 8.0, "retries": 2}
"""Options of a server. A request to a server that is down fails after 27 seconds, so that its error is raised before
`environment.step_timeout`."""

_making = threading.Lock()
_current: ContextVar[Retriever] = ContextVar("triviaqa_retriever")


def open_retriever(kind: str = "bm25", corpus: str | None = None, url: str | None = None) -> Retriever:
    """Return the retriever of `environment.config`, which is created once per process, also with concurrent episodes.

    Without a corpus and a server, the retriever searches the synthetic encyclopaedia.

    Raises:
        UserError: the kind is unknown, the corpus cannot be read, or a key does not apply to the kind.
    """
    with _making:
        return _open(kind, corpus, url)


@lru_cache(maxsize=8)
def _open(kind: str, corpus: str | None, url: str | None) -> Retriever:
    if kind == "server":
        if corpus:
            raise UserError(
                f"environment.config.corpus={corpus} is not read with retriever=server, whose server has a corpus of "
                "its own; leave it out"
            )
        return make_retriever(kind, url=url, **SERVER)
    if url:
        raise UserError(f"environment.config.url={url} needs environment.config.retriever=server; set it, or no url")
    return make_retriever(kind, passages=load_corpus(corpus) if corpus else encyclopaedia.articles())


@contextmanager
def searching(retriever: Retriever) -> Iterator[None]:
    """Set the retriever for tools that are called in this context; other threads have their own."""
    token = _current.set(retriever)
    try:
        yield
    finally:
        _current.reset(token)


def best_passage(query: str) -> Passage | None:
    """Return the best passage for a query, or None.

    Raises:
        UserError: no episode is running.
        RetrieverError: the retriever failed, independently of the query.
    """
    retriever = _current.get(None)
    if retriever is None:
        raise UserError("best_passage is for tools while an episode calls them; call it from a tool function")
    hits = retriever.search([query], topk=1)[0]
    return hits[0].passage if hits else None
