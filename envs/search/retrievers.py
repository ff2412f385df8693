"""Retrievers of episodes: one retriever for the whole process, or one for the few passages of a row."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from mtrl.environments.config_values import check_count, check_positive
from mtrl.errors import UserError
from mtrl.retrieval import Passage, Retriever, RetrieverError, load_corpus, make_retriever

OPTIONS = ("encoder", "index", "stopwords", "timeout", "retries")
"""Further keys of `environment.config`; each kind of retriever accepts some of them and rejects the others."""
SERVER_OPTIONS = {"timeout": 8.0, "retries": 2}
"""Default options of a server. A request to a server that is down fails after 27 seconds, so that its error is raised
before `environment.step_timeout`."""

_making = threading.Lock()


@dataclass(frozen=True)
class RetrieverSettings:
    """The keys of `environment.config` that select the retriever."""

    retriever: str = "bm25"
    """Kind of retriever: bm25 | dense | server"""
    url: str | None = None
    corpus: str | None = None
    options: tuple[tuple[str, Any], ...] = ()
    """The options of `OPTIONS` that were set."""

    @classmethod
    def of(cls, retriever: str, url: str | None, corpus: str | None, options: Mapping[str, Any]) -> RetrieverSettings:
        """Build the settings from `environment.config`; null is the same as a missing key.

        Raises:
            UserError: no retriever has such a key, or its value is out of range.
        """
        given = {name: value for name, value in options.items() if value is not None}
        if unknown := sorted(given.keys() - set(OPTIONS)):
            raise UserError(
                f"environment.config.{unknown[0]} is not known to search; a retriever has {', '.join(OPTIONS)}"
            )
        if "timeout" in given:
            check_positive("timeout", given["timeout"])
        if "retries" in given:
            check_count("retries", given["retries"], low=0)
        # A list has no hash, by which `_shared` finds the retriever of equal settings.
        hashable = {
            name: tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else value
            for name, value in given.items()
        }
        return cls(retriever, url, corpus, tuple(sorted(hashable.items())))

    def make(self) -> Retriever:
        """Return the retriever, which is created once per process, also with concurrent episodes.

        Raises:
            UserError: a setting that the retriever needs is missing, or the corpus cannot be read.
        """
        with _making:
            return _shared(self)

    def check(self) -> None:
        """Create the retriever, and check that a server answers.

        Raises:
            UserError: see `make`; or the server does not answer.
        """
        retriever = self.make()
        if self.retriever == "server":
            try:
                retriever.search(["Is anybody there?"], topk=1)
            except RetrieverError as error:
                raise UserError(
                    f"environment.config.url={self.url}: {error}; start it (scripts/retriever_server.py), or correct "
                    "the address"
                ) from error


@lru_cache(maxsize=8)
def _shared(settings: RetrieverSettings) -> Retriever:
    options = dict(settings.options)
    if settings.retriever == "server":
        if settings.corpus is not None:
            raise UserError(
                f"environment.config.corpus={settings.corpus} is not read with retriever=server, whose server has a "
                "corpus of its own; leave it out"
            )
        return make_retriever("server", url=settings.url, **SERVER_OPTIONS | options)
    passages = None if settings.corpus is None else load_corpus(settings.corpus)
    if passages is None and settings.retriever in ("bm25", "dense"):
        raise UserError(
            "environment.config.corpus=null: there is nothing to search; set it to a file of passages, or set "
            "environment.config.retriever=server and environment.config.url"
        )
    return make_retriever(settings.retriever, passages=passages, url=settings.url, **options)


@lru_cache(maxsize=1024)
def private_retriever(passages: tuple[tuple[str, str], ...]) -> Retriever:
    """Return a BM25 retriever over the (title, text) passages of one row."""
    return make_retriever("bm25", passages=[Passage(str(n), title, text) for n, (title, text) in enumerate(passages)])
