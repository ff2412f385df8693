"""The rules that all HTTP clients share: retries, pauses, size limits and error messages."""

import asyncio
import json
from email.utils import formatdate
from time import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtrl.utils.http_client import (
    MAX_MESSAGE_CHARACTERS,
    ResponseTooLargeError,
    error_message,
    exception_message,
    exponential_pause,
    is_temporary,
    linear_pause,
    printable,
    read_body,
    retry_after,
)


@pytest.mark.parametrize("status", [408, 409, 425, 429, 500, 502, 503, 529])
def test_temporary_statuses_are_retried(status):
    assert is_temporary(status)


@pytest.mark.parametrize("status", [301, 400, 401, 403, 404, 410, 413, 422])
def test_refusals_are_not_retried(status):
    assert not is_temporary(status)


def test_a_429_without_credit_is_not_retried():
    assert not is_temporary(429, '{"error": {"code": "Insufficient_Quota"}}')
    assert is_temporary(429, "slow down")


@given(st.integers(0, 60))
def test_exponential_pauses_double_up_to_their_maximum(retry):
    pause = exponential_pause(retry, 0.5, 30.0)
    assert min(0.25 * 2**retry, 30.0) <= pause <= min(0.75 * 2**retry, 30.0)
    assert exponential_pause(2000 + retry, 0.5, 30.0) == 30.0


def test_linear_pauses_grow_by_the_first_one():
    assert [linear_pause(retry, 0.25) for retry in range(3)] == [0.25, 0.5, 0.75]


def test_retry_after_takes_seconds_or_a_date():
    assert retry_after("2.5") == 2.5
    assert 0 < retry_after(formatdate(time() + 5, usegmt=True)) <= 5
    assert retry_after(formatdate(time() - 5, usegmt=True)) == retry_after("-1") == retry_after("inf") == 0


@given(st.text(max_size=30))
def test_any_retry_after_header_is_read(text):
    assert 0 <= retry_after(text) < float("inf")


def test_the_size_of_a_body_is_limited():
    read = []

    async def parts():
        for part in (b"abc", b"def", b"ghi"):
            read.append(part)
            yield part

    assert asyncio.run(read_body(parts(), 9)) == b"abcdefghi"
    read.clear()
    with pytest.raises(ResponseTooLargeError, match="larger than 5 bytes"):
        asyncio.run(read_body(parts(), 5))
    assert read == [b"abc", b"def"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"error": {"message": "too long", "code": 400}}, "too long"),
        ({"error": {"type": "x"}}, '{"type": "x"}'),
        ({"error": "unknown field"}, "unknown field"),
        ({"object": "error", "message": "bad"}, "bad"),
        ({"success": False, "message": "flush failed"}, "flush failed"),
        ({"detail": "Not Found"}, "Not Found"),
        ({"detail": [{"loc": ["body"], "msg": "required"}]}, '[{"loc": ["body"], "msg": "required"}]'),
        ([1, 2], "[1, 2]"),
        (b"Internal Server Error", "Internal Server Error"),
        (b"[" * 100_000, "[" * 100_000),
        (b"", ""),
    ],
)
def test_the_error_message_of_a_body(body, message):
    assert error_message(body if isinstance(body, bytes) else json.dumps(body).encode()) == message


@given(st.binary(max_size=200) | st.recursive(st.text(), lambda s: st.lists(s) | st.dictionaries(st.text(), s)))
@settings(deadline=None)
def test_any_body_has_an_error_message(body):
    assert isinstance(error_message(body if isinstance(body, bytes) else json.dumps(body).encode()), str)


def test_an_exception_without_a_text_has_its_type_as_message():
    assert exception_message(TimeoutError()) == "TimeoutError"
    assert exception_message(OSError("no route")) == "OSError: no route"


def test_a_printable_message_is_one_short_line_without_the_secret():
    line = printable(f"{'x' * 140}secret-0123\n\x1b[31m{'y' * 10_000}", "secret-0123")
    assert line.isprintable() and len(line) < MAX_MESSAGE_CHARACTERS + 60
    assert "secret" not in line and "***" in line
    assert printable("plain") == "plain"
