"""A model behind an endpoint: requests, parsing of answers, and failures of the server."""

import asyncio
import gzip
import json
from dataclasses import replace
from email.utils import formatdate
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtrl.config.schema import EndpointConfig
from mtrl.engines.base import SamplingParams
from mtrl.engines.endpoints import chat_client
from mtrl.engines.endpoints import engine as endpoint
from mtrl.engines.endpoints.engine import Address, EndpointEngine, EndpointError, EndpointRefusedError, read_answer
from mtrl.engines.endpoints.wire import ChatPrompt
from mtrl.errors import UserError
from mtrl.types import FinishReason
from tests.engines.chat_server import ChatServer, Reply, always, chat_reply, refusal

PROMPT = ChatPrompt([{"role": "user", "content": "Q"}])
KEY = "sk-very-secret-0123456789"


@pytest.fixture(autouse=True)
def _fast(monkeypatch):
    """Short pauses, and no API key of this machine."""
    monkeypatch.setattr(chat_client, "FIRST_PAUSE", 0.01)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def ask(url, prompt=PROMPT, sampling=None, times=1, engine=None, **config):
    """Return the results of `times` concurrent requests; errors are returned."""
    engine = engine or EndpointEngine(Address("m", url), EndpointConfig(**{"timeout": 5.0, "retries": 2, **config}))
    sampling = sampling or SamplingParams(max_generate_length=7, temperature=0.0)

    async def run():
        requests = (engine.generate(str(i), prompt, sampling) for i in range(times))
        answers = await asyncio.gather(*requests, return_exceptions=True)
        await engine.close()
        return answers

    answers = asyncio.run(asyncio.wait_for(run(), 60))
    return (answers[0] if times == 1 else answers), engine


def refused(url, error=EndpointError, **config):
    answer, engine = ask(url, **config)
    assert isinstance(answer, error), answer
    return str(answer), engine


# -- requests and answers ---------------------------------------------------------------------------------------------


def test_the_request_of_a_greedy_turn():
    with ChatServer(always(chat_reply("hello"))) as server:
        answer, engine = ask(server.url)
    assert server.requests == [
        {"model": "m", "messages": [{"role": "user", "content": "Q"}], "max_tokens": 7, "temperature": 0.0}
    ]
    assert "authorization" not in server.headers[0]
    assert (answer.content, answer.finish, answer.token_ids, answer.logprobs) == ("hello", FinishReason.STOP, [], [])
    assert answer.usage == {"prompt_tokens": 11, "completion_tokens": 5, "cached_tokens": 3, "retries": 0}
    assert (engine.stats.prompt_tokens, engine.stats.sampled_tokens, engine.stats.cached_tokens) == (11, 5, 3)


def test_the_request_of_a_sampled_turn():
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    sampling = SamplingParams(9, 0.7, 0.9, 20, stop=("</a>",), stop_token_ids=(1, 2), seed=2**63 + 5)
    with ChatServer(always(chat_reply("hello"))) as server:
        extra = {"max_tokens": None, "max_completion_tokens": 99, "reasoning": {"effort": "low"}}
        ask(server.url, ChatPrompt(PROMPT.messages, tools), sampling, extra_body=extra)
    sent = server.requests[0]
    assert sent["tools"] == tools and sent["stop"] == ["</a>"]
    assert (sent["temperature"], sent["top_p"], sent["top_k"], sent["seed"]) == (0.7, 0.9, 20, 5)
    assert "max_tokens" not in sent and sent["max_completion_tokens"] == 99 and sent["reasoning"] == {"effort": "low"}


def test_the_key_is_sent_and_never_shown(monkeypatch, caplog):
    monkeypatch.setenv("MY_KEY", KEY)
    caplog.set_level("DEBUG")
    with ChatServer(always(refusal(500, f"your key {KEY} is bad \x1b[2J"))) as server:
        message, _ = refused(server.url, api_key_env="MY_KEY")
    assert server.headers[0]["authorization"] == f"Bearer {KEY}"
    assert KEY not in message + caplog.text and "your key *** is bad" in message
    assert "\x1b" not in message


def test_an_invalid_key_is_refused(monkeypatch):
    monkeypatch.setenv("MY_KEY", "geheim\u00fc")
    with pytest.raises(UserError, match="api_key_env=MY_KEY: the value of this variable cannot be an API key") as error:
        EndpointEngine(Address("m", "http://127.0.0.1/v1"), EndpointConfig(api_key_env="MY_KEY"))
    assert "geheim" not in str(error.value)


def test_truncated_turns_and_native_calls_are_parsed():
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
    with ChatServer(always(chat_reply(None, calls=[call], finish="tool_calls", reasoning_content="hm"))) as server:
        answer, _ = ask(server.url)
    assert answer.content == "" and answer.reasoning == "hm"
    assert [(c.name, c.arguments, c.id, c.status) for c in answer.calls] == [("look", {"at": 1}, "c1", "ok")]
    with ChatServer(always(chat_reply("half", finish="length"))) as server:
        assert ask(server.url)[0].finish == FinishReason.LENGTH


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<sql>select 1", "<sql>select 1</sql>"),
        ("<sql>a</sql> then <sql>b", "<sql>a</sql> then <sql>b</sql>"),
        ("<sql>a</sql>", "<sql>a</sql>"),
        ("no tag", "no tag"),
    ],
)
def test_the_removed_stop_string_is_restored(text, expected):
    with ChatServer(always(chat_reply(text))) as server:
        answer, _ = ask(server.url, sampling=SamplingParams(7, 0.0, stop=("</answer>", "</sql>")))
    assert answer.content == expected


@pytest.mark.parametrize(
    ("report", "expected"),
    [
        ({"stop_reason": "</sql>"}, "<sql>a</sql>"),
        ({"stop_reason": None}, "<sql>a"),  # vLLM, at the model's end token
        ({"matched_stop": "</sql>"}, "<sql>a</sql>"),
        ({"matched_stop": 7}, "<sql>a"),  # SGLang, at the model's end token
        ({"stop_reason": "end_turn"}, "<sql>a</sql>"),  # another server's word, which says nothing
    ],
)
def test_a_turn_that_the_model_ended_itself_gets_no_stop_string(report, expected):
    body = chat_reply("<sql>a").body
    assert read_answer({**body, "choices": [body["choices"][0] | report]}, ("</sql>",)).content == expected


def test_unpaired_surrogates_are_replaced():
    body = json.dumps(chat_reply("x").body).replace('"x"', '"a\\ud800b"').encode()
    with ChatServer(always(Reply(200, body))) as server:
        assert ask(server.url)[0].content == "a?b"
    call = {"id": "c\ud800", "type": "function", "function": {"name": "look\ud800", "arguments": "{}"}}
    with ChatServer(always(chat_reply(None, calls=[call], reasoning="h\ud800m"))) as server:
        answer, _ = ask(server.url)
    assert [(c.id, c.name) for c in answer.calls] == [("c?", "look?")] and answer.reasoning == "h?m"


def test_unknown_keys_of_an_answer_are_ignored():
    with ChatServer(always(Reply(body={**chat_reply("x").body, "full": True, "is_full": True}))) as server:
        answer, _ = ask(server.url)
    assert answer.content == "x" and not answer.is_full


def test_implausible_token_counts_are_zero():
    with ChatServer(always(chat_reply("x", prompt=10**400, completion=2**41, cached=2**40))) as server:
        usage = ask(server.url)[0].usage
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["cached_tokens"]) == (0, 0, 2**40)


# -- servers that fail ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "trouble",
    [
        refusal(429, "slow down"),
        refusal(500, "oops"),
        refusal(503, "overloaded"),
        refusal(529, "overloaded"),
        Reply(502, b"<html>bad gateway</html>"),
        Reply(502, b"bad gateway", {"content-type": "text/html; charset=undefined"}),
        Reply(500, b"[" * 5000),
        Reply(200, b"{half a js"),
        Reply(200, b"\xff\xfe\x00"),
        Reply(200, b"[" * 5000),
        Reply(200, {"choices": []}),
        Reply(200, {"choices": [{"message": {"content": 5}}]}),
        Reply(200, {"choices": [{"message": "text"}]}),
        Reply(body=None),
    ],
    ids=lambda reply: f"{reply.status}-{str(reply.body)[:20]}",
)
def test_temporary_failures_are_retried(trouble):
    with ChatServer(always(trouble, trouble, chat_reply("well"))) as server:
        answer, engine = ask(server.url)
    assert answer.content == "well" and len(server.requests) == 3
    assert answer.usage["retries"] == 2 and engine.stats.extra == {"requests": 3.0, "retries": 2.0}


def test_pauses_grow_with_a_random_factor(monkeypatch):
    pauses = []

    async def sleep(seconds):
        pauses.append(seconds)

    monkeypatch.setattr(chat_client.asyncio, "sleep", sleep)
    with ChatServer(always(refusal(500, "oops"))) as server:
        message, _ = refused(server.url, retries=5)
    bounds = [(0.005 * 2**n, 0.015 * 2**n) for n in range(5)]
    assert all(low <= pause <= high for pause, (low, high) in zip(pauses, bounds, strict=True))
    assert "no answer in 6 attempts, the last time: HTTP 500 oops" in message


@pytest.mark.parametrize("header", ["0.4", "date"])
def test_retry_after_is_respected(header):
    retry_after = formatdate(__import__("time").time() + 2, usegmt=True) if header == "date" else header
    with ChatServer(always(refusal(429, "slow down", retry_after=retry_after), chat_reply("well"))) as server:
        answer, _ = ask(server.url)
    assert answer.content == "well"
    assert server.times[1] - server.times[0] >= 0.4


@pytest.mark.parametrize("reply", [replace(chat_reply("late"), before=30), replace(chat_reply("late"), between=0.2)])
def test_an_endless_answer_times_out(reply):
    with ChatServer(always(reply)) as server:
        message, _ = refused(server.url, timeout=0.3, retries=1)
    assert "gave no answer in 2 attempts" in message and "Timeout" in message


@pytest.mark.parametrize("status", [200, 400])
def test_the_size_of_an_answer_is_limited(status, monkeypatch):
    client = partial(chat_client.ChatClient, largest=10_000)
    monkeypatch.setattr("mtrl.engines.endpoints.engine.ChatClient", client)
    bomb = gzip.compress(b" " * 10_000_000)
    with ChatServer(always(Reply(status, bomb, {"content-encoding": "gzip"}), chat_reply("well"))) as server:
        answer, _ = ask(server.url)
        assert answer.content == "well" and answer.usage["retries"] == 1
    with ChatServer(always(Reply(status, b" " * 20_000))) as server:
        message, _ = refused(server.url, retries=0)
    assert "the answer is larger than 10,000 bytes" in message


def test_an_unreachable_server_is_reported():
    with ChatServer(always(chat_reply("x"))) as server:
        url = server.url
    message, _ = refused(url, retries=1)
    assert "gave no answer in 2 attempts" in message and "ConnectError" in message


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (
            refusal(401, "Incorrect API key"),
            "HTTP 401 Incorrect API key; evaluation.endpoint.api_key_env=OPENAI_API_KEY",
        ),
        (refusal(404, "The model m does not exist"), "does not exist; check the name of the model and the address"),
        (Reply(308, b"", {"location": "/v2"}), "HTTP 308; check the name of the model and the address"),
        (
            refusal(429, "You exceeded your current quota", "insufficient_quota"),
            "the account of the key has no credit left",
        ),
    ],
)
def test_permanent_failures_are_not_retried(reply, words):
    with ChatServer(always(reply)) as server:
        message, engine = refused(server.url, EndpointRefusedError)
        assert words in message and "\n" not in message and len(server.requests) == 1
        again, _ = ask(server.url, engine=engine)
    assert isinstance(again, EndpointRefusedError) and len(server.requests) == 1


def test_a_refused_conversation_does_not_end_the_others():
    with ChatServer(always(chat_reply("x"), refusal(400, "content_filter"), chat_reply("y"))) as server:
        _, engine = ask(server.url)
        answer, _ = ask(server.url, engine=engine)
        assert isinstance(answer, EndpointError) and "refused this conversation: HTTP 400 content_filter" in str(answer)
        assert ask(server.url, engine=engine)[0].content == "y"


def test_a_conversation_refused_before_the_first_answer_does_not_end_the_others():
    """A filter is faster than a model, and a resumed evaluation may begin with a row that is always refused."""
    with ChatServer(always(refusal(400, "content_filter"), refusal(400, "content_filter"), chat_reply("y"))) as server:
        first, engine = ask(server.url)
        assert isinstance(first, EndpointError)
        assert isinstance(ask(server.url, engine=engine)[0], EndpointError), "the same episode once more"
        assert ask(server.url, engine=engine)[0].content == "y" and engine.refused is None


def test_settings_that_every_conversation_fails_by_end_the_run():
    with ChatServer(always(refusal(400, "Unsupported parameter: max_tokens"))) as server:
        answers, _ = ask(server.url, times=4, max_concurrent=1)
        assert len(server.requests) == 3, "the fourth is not sent"
    assert [isinstance(answer, EndpointRefusedError) for answer in answers] == [False, False, True, True]
    assert "max_tokens; if it refuses all, change what is sent by evaluation.endpoint.extra_body" in str(answers[0])
    assert "max_tokens; change what is sent by evaluation.endpoint.extra_body" in str(answers[2])


def test_a_full_context_is_not_a_failure():
    words = "This model's maximum context length is 8 tokens"
    with ChatServer(always(refusal(400, words, "context_length_exceeded"))) as server:
        answer, engine = ask(server.url, replace(PROMPT, messages=[*PROMPT.messages, {"role": "assistant"}]))
        first, _ = refused(server.url)
    assert answer.is_full and answer.finish == FinishReason.LENGTH and engine.refused is None
    assert "no room for the first prompt of this conversation" in first and words in first


def test_concurrent_requests_are_limited():
    with ChatServer(always(replace(chat_reply("x"), before=0.05))) as server:
        answers, _ = ask(server.url, times=12, max_concurrent=3)
    assert len(answers) == 12 and server.most_busy <= 3


NAMES = ("choices", "message", "content", "tool_calls", "function", "name", "arguments", "id", "prompt_tokens")
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=4),
    max_leaves=20,
)


@given(ANYTHING)
def test_any_json_is_an_answer_or_an_error(value):
    try:
        answer = endpoint.as_completion(json.dumps({"choices": [{"message": value}], "usage": value}).encode())
    except endpoint.GarbledAnswerError:
        return
    generation = endpoint.read_answer(answer, ("</a>",))
    assert isinstance(generation.content, str) and all(count >= 0 for count in generation.usage.values())
