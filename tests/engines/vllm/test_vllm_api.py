"""Requests to a vLLM server, and the parsing of its answers. The real server: tests/engines/real/vllm."""

import asyncio
import json
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtrl.config.engine_schema import VllmConfig
from mtrl.engines.base import SamplingParams
from mtrl.engines.server.server_api import ServerError, ServerRefusedError, ServerUnreachableError, TurnRequest
from mtrl.engines.server.turn import check_answer
from mtrl.engines.vllm.vllm_api import VllmApi, sampling_body, turn_seed
from mtrl.types import FinishReason


class Answering:
    """Stand-in for `Http` that gives the same answer to all requests, or raises an error."""

    def __init__(self, answer):
        self.answer, self.requests = answer, []

    async def request(self, method, path, body=None, *, seconds, params=None):
        self.requests.append((path, params if body is None else body, seconds))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def api(answer, **settings) -> VllmApi:
    return VllmApi("http://127.0.0.1:1", None, VllmConfig(**settings), Answering(answer))


def generate(answer):
    """Parse and check an answer, as the engine does."""
    request = TurnRequest("r", [1, 2], SamplingParams(), 8)
    generation = asyncio.run(api(answer).generate(request))
    check_answer(generation, request, vocabulary=10)
    return generation


def answer(ids=(5, 6), logprobs=(-1.0, -2.0), finish="length", spans=(("default", 0, 1), ("7", 1, 2)), cached=None):
    return {
        "choices": [
            {
                "token_ids": list(ids),
                "logprobs": {"content": [{"token_id": 0, "logprob": logprob} for logprob in logprobs]},
                "finish_reason": finish,
                "weight_versions": [{"version": v, "start": start, "end": end} for v, start, end in spans],
            }
        ],
        "usage": {"prompt_tokens_details": None if cached is None else {"cached_tokens": cached}},
    }


def test_an_answer_is_parsed():
    generation = generate(answer(cached=32))
    assert (generation.token_ids, generation.logprobs) == ([5, 6], [-1.0, -2.0])
    assert generation.version_spans == [(0, 1), (7, 1)] and generation.cached_tokens == 32
    assert generation.finish == FinishReason.LENGTH


def test_an_answer_without_tokens_is_parsed():
    empty = answer((), (), "abort", ())
    empty["choices"][0] |= {"weight_versions": None, "logprobs": None}
    assert generate(empty).finish == FinishReason.ABORT


@pytest.mark.parametrize(
    "wrong",
    [
        None, [], {}, {"choices": []}, answer(finish="error"), answer(finish=None), answer(logprobs=(-1.0,)),
        answer(logprobs=(-1.0, -9999.0)), answer(logprobs=(-1.0, float("nan"))), answer(spans=(("7", 0, 1),)),
        answer(spans=(("seven", 0, 2),)), answer(logprobs=(-1.0, None)),
    ],
)  # fmt: skip
def test_invalid_answers_are_errors(wrong):
    with pytest.raises(ServerError):
        generate(wrong)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(list(answer()["choices"][0])), inner),
    max_leaves=10,
)


@given(json_values, st.sampled_from(["choices", "usage", *answer()["choices"][0]]))
def test_any_answer_is_a_turn_or_an_error(value, place):
    """Servers are not trusted: any value may be anywhere in an answer."""
    garbled = answer()
    target = garbled if place in garbled else garbled["choices"][0]
    target[place] = value
    with suppress(ServerError):
        generate(garbled)


@given(st.integers(0, 2**64 - 1), st.integers(1, 10**6), st.integers(1, 10**6))
def test_every_turn_of_a_trajectory_has_another_seed(seed, first, second):
    assert 0 <= turn_seed(seed, first) < 2**63
    assert (turn_seed(seed, first) == turn_seed(seed, second)) == (first == second)


def test_sampling_parameters_are_sent_in_full():
    assert sampling_body(SamplingParams(temperature=0.0, top_p=0.5, top_k=3), 7, 1) == {
        "max_tokens": 7, "temperature": 0.0, "logprobs": 0, "ignore_eos": True, "stop_token_ids": [],
        "detokenize": False,
    }  # fmt: skip
    warm = sampling_body(SamplingParams(temperature=0.5, top_p=0.9, top_k=3, stop=("</a>",), stop_token_ids=(2,)), 7, 1)
    assert (warm["top_p"], warm["top_k"], warm["stop"], warm["stop_token_ids"]) == (0.9, 3, ["</a>"], [2])
    assert warm["detokenize"] and warm["include_stop_str_in_output"] and not warm["skip_special_tokens"]


def test_a_server_that_refuses_the_token_is_never_ready():
    with pytest.raises(ServerRefusedError):
        asyncio.run(api(ServerRefusedError("401")).is_ready())
    assert asyncio.run(api(ServerUnreachableError("nobody")).is_ready()) is False
    assert asyncio.run(api(ServerError("500")).is_alive()) is False
    assert asyncio.run(api(None).is_alive()) is True


@pytest.mark.parametrize("answer", [None, {}, {"success": False}, {"success": "no"}, []])
def test_a_failed_cache_reset_is_an_error(answer):
    with pytest.raises(ServerError, match="did not drop"):
        asyncio.run(api(answer).drop_cache())


@pytest.mark.parametrize("answer", [None, {}, {"weight_version": None}, {"weight_version": "x"}, []])
def test_an_invalid_version_is_an_error(answer):
    with pytest.raises(ServerError, match="no policy version"):
        asyncio.run(api(answer).version())


def test_an_update_is_checked_before_it_is_finished():
    http = Answering(None)
    asyncio.run(VllmApi("http://127.0.0.1:1", None, VllmConfig(sync_timeout=3.0), http).end_update(12))
    assert [(path, seconds) for path, _, seconds in http.requests] == [
        ("/update_weights", 3.0), ("/finish_weight_update", 3.0)
    ]  # fmt: skip
    assert json.loads(json.dumps(http.requests[1][1])) == {"weight_version": "12"}


@pytest.mark.parametrize(("lora", "level"), [("merged", "2"), ("adapter", "1")])
def test_only_servers_with_adapters_store_their_base_weights_while_they_sleep(lora, level):
    http = Answering(None)
    asyncio.run(VllmApi("http://127.0.0.1:1", None, VllmConfig(lora=lora), http).sleep())
    assert [request[:2] for request in http.requests] == [("/sleep", {"level": level, "mode": "wait"})]
