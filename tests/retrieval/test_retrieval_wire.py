"""The format of requests and answers, byte for byte, and errors for other bodies."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtrl.retrieval import Hit, Passage
from mtrl.retrieval.wire import SearchRequest, parse_answer, parse_request, write_answer

HITS = [[Hit(Passage("7", "Ada", "She wrote\nnotes."), 1.5), Hit(Passage("8", "", "Zürich"), 0.25)], []]
DOCUMENT = '{"id": "7", "title": "Ada", "text": "She wrote\\nnotes.", "contents": "Ada\\nShe wrote\\nnotes."}'
OTHER = '{"id": "8", "title": "", "text": "Z\\u00fcrich", "contents": "\\nZ\\u00fcrich"}'


def test_answers_with_scores():
    golden = f'{{"result": [[{{"document": {DOCUMENT}, "score": 1.5}}, {{"document": {OTHER}, "score": 0.25}}], []]}}'
    assert write_answer(HITS, return_scores=True).decode() == golden
    assert parse_answer(golden.encode(), queries=2) == HITS


def test_answers_without_scores_keep_the_order():
    golden = f'{{"result": [[{DOCUMENT}, {OTHER}], []]}}'
    assert write_answer(HITS, return_scores=False).decode() == golden
    read = parse_answer(golden.encode(), queries=2)
    assert [[hit.passage for hit in hits] for hits in read] == [[hit.passage for hit in hits] for hits in HITS]
    assert [[hit.score for hit in hits] for hits in read] == [[0.0, -1.0], []]


def test_documents_of_other_servers():
    """Answers of Search-R1 for wiki-18 have the title in quotes, as the first line of the contents."""
    answer = {"result": [[{"document": {"id": "3", "contents": '"Ada"\nnotes\nmore'}, "score": 1}]]}
    assert parse_answer(json.dumps(answer).encode(), 1) == [[Hit(Passage("3", "Ada", "notes\nmore"), 1.0)]]
    answer = {"result": [[{"contents": "Ada\nnotes"}]]}
    assert parse_answer(json.dumps(answer).encode(), 1) == [[Hit(Passage("Ada\nnotes", "Ada", "notes"), 0.0)]]
    answer = {"result": [[{"title": "Ada", "text": "notes"}, {"title": "Ada", "text": "more"}]]}
    (hits,) = parse_answer(json.dumps(answer).encode(), 1)
    assert [hit.passage.id for hit in hits] == ["Ada\nnotes", "Ada\nmore"]


SENT = {
    '{"queries": ["a", "b"], "topk": 2, "return_scores": true}': SearchRequest(["a", "b"], 2, True),
    '{"query": "a"}': SearchRequest(["a"]),
    '{"query": ["a"], "topk": null}': SearchRequest(["a"]),
    '{"queries": "a", "topk": 100}': SearchRequest(["a"], 100),
    '{"queries": [], "return_scores": false, "user": "me"}': SearchRequest([]),
    '{"query": "\\u0000\\ud800"}': SearchRequest(["\0\ud800"]),
}


@pytest.mark.parametrize("body, request_", SENT.items(), ids=SENT.keys())
def test_valid_requests_are_parsed(body, request_):
    assert parse_request(body.encode()) == request_


NOT_REQUESTS = {
    b"": "not JSON",
    b'{"query": "a"': "not JSON",
    b'{"query": "\xff"}': "not JSON in UTF-8",
    b"[" * 100_000: "not JSON",
    b'{"topk": ' + b"9" * 10_000 + b"}": "not JSON",
    b'["a"]': "one JSON object",
    b"null": "one JSON object",
    b"{}": "either queries or query",
    b'{"query": "a", "queries": ["a"]}': "either queries or query",
    b'{"query": null}': "queries must be a text or a list of texts",
    b'{"query": 3}': "queries must be",
    b'{"queries": ["a", 3]}': "queries must be",
    b'{"queries": [["a"]]}': "queries must be",
    b'{"queries": {"a": "b"}}': "queries must be",
    json.dumps({"queries": ["a"] * 1025}).encode(): "queries has 1025 texts; send at most 1024",
    b'{"query": "a", "topk": 0}': "topk must be a whole number from 1 to 100, or null",
    b'{"query": "a", "topk": 101}': "topk must",
    b'{"query": "a", "topk": -1}': "topk must",
    b'{"query": "a", "topk": 2.0}': "topk must",
    b'{"query": "a", "topk": true}': "topk must",
    b'{"query": "a", "topk": "3"}': "topk must",
    b'{"query": "a", "topk": NaN}': "topk must",
    b'{"query": "a", "topk": 1e999}': "topk must",
    b'{"query": "a", "return_scores": 1}': "return_scores must be true or false",
    b'{"query": "a", "return_scores": null}': "return_scores must",
}


@pytest.mark.parametrize("body, message", NOT_REQUESTS.items(), ids=[str(body[:40]) for body in NOT_REQUESTS])
def test_invalid_requests_are_value_errors(body, message):
    with pytest.raises(ValueError, match=message) as caught:
        parse_request(body)
    assert len(str(caught.value)) < 100


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(["query", "queries", "topk", "x"]), inner),
    max_leaves=8,
)


@given(JSON)
def test_any_json_is_a_request_or_a_value_error(value):
    try:
        request = parse_request(json.dumps(value).encode())
    except ValueError:
        return
    assert all(isinstance(query, str) for query in request.queries)
    assert request.topk is None or 1 <= request.topk <= 100


NOT_ANSWERS = {
    b"<html>": "not JSON",
    b"[]": "no list of lists",
    b'{"result": 3}': "no list of lists",
    b'{"result": [{}]}': "no list of lists",
    b'{"detail": "no"}': "no list of lists",
    b'{"result": []}': "0 lists for 1 queries",
    b'{"result": [[], []]}': "2 lists for 1 queries",
    b'{"result": [["text"]]}': "cannot be read: a str, not an object",
    b'{"result": [[{"document": {"id": "1"}, "score": 1}]]}': "cannot be read: neither",
    b'{"result": [[{"document": {"text": "a"}, "score": "high"}]]}': "a score that is no number: 'high'",
    b'{"result": [[{"document": {"text": "a"}, "score": NaN}]]}': "a score that is no number",
    b'{"result": [[{"document": {"text": "a"}, "score": 1' + b"0" * 400 + b"}]]}": "a score that is no number: '10000",
    b'{"result": [[{"document": {"text": "a"}}]]}': "a score that is no number: 'None'",
}


@pytest.mark.parametrize("body, message", NOT_ANSWERS.items(), ids=[body.decode()[:60] for body in NOT_ANSWERS])
def test_invalid_answers_are_value_errors(body, message):
    with pytest.raises(ValueError, match=message):
        parse_answer(body, queries=1)
