"""The format of requests and answers between client and retriever server: the de-facto format of Search-R1 and SkyRL.

A request is `{"queries": [...], "topk": 3, "return_scores": true}`; the key may be `query`, its value one text, and
`topk` null. The answer has a list per query: with scores `{"result": [[{"document": {...}, "score": 1.5}, ...]]}`,
without scores `{"result": [[{...}, ...]]}`. A document has `id`, `title`, `text` and `contents` (title and text in
one string).
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from mtrl.retrieval.passage import document_of, passage_of
from mtrl.retrieval.retriever import Hit

MOST_QUERIES = 1024
LARGEST_TOPK = 100


@dataclass(frozen=True)
class SearchRequest:
    """A request to search. A `topk` of None stands for the server's default."""

    queries: list[str]
    topk: int | None = None
    return_scores: bool = False


def parse_request(body: bytes) -> SearchRequest:
    """Parse a request of any client. Unknown keys are ignored, as by other servers.

    Raises:
        ValueError: the request is malformed; the message is one sentence.
    """
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        raise ValueError("the body is not JSON in UTF-8") from None
    if not isinstance(value, dict):
        raise ValueError("the body must be one JSON object")
    if ("query" in value) == ("queries" in value):
        raise ValueError("the body must have either queries or query")
    queries = value["queries"] if "queries" in value else value["query"]
    queries = [queries] if isinstance(queries, str) else queries
    if not isinstance(queries, list) or not all(isinstance(query, str) for query in queries):
        raise ValueError("queries must be a text or a list of texts")
    if len(queries) > MOST_QUERIES:
        raise ValueError(f"queries has {len(queries)} texts; send at most {MOST_QUERIES} at once")
    topk, return_scores = value.get("topk"), value.get("return_scores", False)
    is_number = isinstance(topk, int) and not isinstance(topk, bool)
    if topk is not None and not (is_number and 1 <= topk <= LARGEST_TOPK):
        raise ValueError(f"topk must be a whole number from 1 to {LARGEST_TOPK}, or null")
    if not isinstance(return_scores, bool):
        raise ValueError("return_scores must be true or false")
    return SearchRequest(queries, topk, return_scores)


def write_answer(found: Sequence[Sequence[Hit]], return_scores: bool) -> bytes:
    """Return the body of an answer."""
    if not return_scores:
        plain: list[Any] = [[document_of(hit.passage) for hit in hits] for hits in found]
    else:
        plain = [[{"document": document_of(hit.passage), "score": hit.score} for hit in hits] for hits in found]
    return json.dumps({"result": plain}).encode()


def parse_answer(body: bytes, queries: int) -> list[list[Hit]]:
    """Parse the answer to `queries` queries, with or without scores; `passage_of` reads the documents.

    In an answer without scores, the hits of a query get the scores 0.0, -1.0, -2.0, ..., which express only the order.
    A document without an id has its contents as its id.

    Raises:
        ValueError: the answer is malformed; the message is one sentence.
    """
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        raise ValueError("the answer is not JSON in UTF-8") from None
    result = value.get("result") if isinstance(value, dict) else None
    if not isinstance(result, list) or not all(isinstance(hits, list) for hits in result):
        raise ValueError("the answer has no list of lists under 'result'")
    if len(result) != queries:
        raise ValueError(f"the answer has {len(result)} lists for {queries} queries")
    return [[_parse_hit(hit, rank) for rank, hit in enumerate(hits)] for hits in result]


def _parse_hit(hit: Any, rank: int) -> Hit:
    has_score = isinstance(hit, dict) and "document" in hit
    document, score = (hit["document"], hit.get("score")) if has_score else (hit, float(-rank))
    try:
        passage = passage_of(document, default_id="")
    except ValueError as error:
        raise ValueError(f"the answer has a document that cannot be read: {error}") from None
    if "id" not in document:
        contents = document.get("contents")
        passage = replace(passage, id=contents if isinstance(contents, str) else passage.contents)
    return Hit(passage, _number(score))


def _number(score: Any) -> float:
    """Return a score as a float; whole numbers of JSON may exceed the range of floats."""
    number = math.nan
    if isinstance(score, int | float) and not isinstance(score, bool):
        with suppress(OverflowError):
            number = float(score)
    if not math.isfinite(number):
        raise ValueError(f"the answer has a score that is no number: {str(score)[:40]!r}")
    return number
