"""Bodies of requests to SGLang, and the parsing of its answers: any answer is a turn or a ServerError."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtrl.engines.base import SamplingParams
from mtrl.engines.server.server_api import ServerError, TurnRequest
from mtrl.engines.server.turn import check_answer
from mtrl.engines.sglang.bodies import read_loads, read_turn, read_version, sampling_body, turn_body
from mtrl.types import FinishReason

URL = "http://127.0.0.1:1"


def answer(ids, spans=None, finish="stop", **meta):
    pairs = [[-0.5 - index, token, None] for index, token in enumerate(ids)]
    message = {"finish_reason": {"type": finish}, "weight_version": "3", "output_token_logprobs": pairs, **meta}
    if spans is not None:
        message["weight_versions"] = spans
    return {"output_ids": ids, "meta_info": message}


def read(message):
    """Parse and check an answer, as the engine does."""
    turn = read_turn(message, URL)
    check_answer(turn, TurnRequest("r", [1, 2], SamplingParams(), 8), vocabulary=10)
    return turn


def test_an_answer_is_parsed():
    spans = [{"version": "2", "start": 0, "end": 1}, {"version": "3", "start": 1, "end": 3}]
    turn = read(answer([7, 8, 9], spans, "length", cached_tokens=5))
    assert turn.token_ids == [7, 8, 9] and turn.logprobs == [-0.5, -1.5, -2.5]
    assert turn.finish is FinishReason.LENGTH and turn.version_spans == [(2, 1), (3, 2)] and turn.cached_tokens == 5


@pytest.mark.parametrize(
    ("text", "finish"), [("a</sql>", FinishReason.STOP), ("a</sql", FinishReason.LENGTH), (None, FinishReason.LENGTH)]
)
def test_a_stop_string_that_ends_at_the_limit_ends_the_turn(text, finish):
    assert read_turn(answer([7, 8], finish="length") | {"text": text}, URL, ("</sql>",)).finish is finish


def test_an_answer_with_one_version_is_parsed():
    assert read(answer([7, 8])).version_spans == [(3, 2)]


def test_an_answer_without_tokens_is_parsed():
    empty = {"output_ids": [], "meta_info": {"finish_reason": {"type": "abort"}, "weight_version": "3"}}
    turn = read(empty)
    assert turn.token_ids == [] and turn.version_spans == [] and turn.finish is FinishReason.ABORT


@pytest.mark.parametrize(
    "wrong",
    [
        None,
        [],
        {"text": "hello"},
        answer([7, 8]) | {"output_ids": [7]},
        answer([7, 8]) | {"output_ids": [7, 9]},
        answer([7], finish="tired"),
        answer([7], [{"version": "new", "start": 0, "end": 1}]),
        answer([7, 8], [{"version": "3", "start": 0, "end": 1}]),
        answer([7], output_token_logprobs=[[None, 7, None]]),
        answer([7], output_token_logprobs=[[math.inf, 7, None]]),
        answer([7], finish_reason="stop"),
        answer([7], cached_tokens=math.inf),
    ],
)
def test_invalid_answers_are_errors(wrong):
    with pytest.raises(ServerError):
        read(wrong)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
PAIRS = st.lists(st.tuples(st.floats(), st.integers(), st.none()).map(list), max_size=3)
IDS = st.lists(st.integers(), max_size=3)
META = st.fixed_dictionaries(
    {},
    optional={
        "finish_reason": st.fixed_dictionaries({"type": st.sampled_from(["stop", "length", "abort"]) | JSON}) | JSON,
        "output_token_logprobs": st.lists(st.tuples(st.floats(), st.integers(), st.none()).map(list), max_size=3)
        | JSON,
        "weight_version": st.sampled_from(["0", "default", "x"]) | JSON,
        "weight_versions": JSON,
        "cached_tokens": JSON,
    },
)


@given(st.fixed_dictionaries({}, optional={"output_ids": IDS | JSON, "meta_info": META}))
def test_any_answer_is_a_turn_or_an_error(message):
    try:
        turn = read(message)
    except ServerError:
        return
    assert len(turn.token_ids) == len(turn.logprobs) == sum(count for _, count in turn.version_spans)
    assert all(isinstance(token, int) for token in turn.token_ids) and all(map(math.isfinite, turn.logprobs))


def test_versions_are_parsed():
    assert read_version("12", URL) == 12 and read_version("default", URL) == 0
    for wrong in ("v1", "-1", "", None, 3, "٣"):
        with pytest.raises(ServerError, match="not a policy version"):
            read_version(wrong, URL)


def test_loads_of_all_schedulers_are_summed():
    load = {"num_running_reqs": 2, "num_waiting_reqs": 3}
    assert read_loads({"loads": [load, load]}, URL) == (4, 6)
    with pytest.raises(ServerError, match="reports no load"):
        read_loads({"loads": [{}]}, URL)


def test_turns_end_at_tokens_only_if_stop_tokens_are_given():
    assert sampling_body(SamplingParams(stop_token_ids=(5,)), 8, None)["ignore_eos"] is False
    assert sampling_body(SamplingParams(stop=("</a>",)), 8, None)["ignore_eos"] is True


def test_salt_adapter_and_seed_are_sent_only_if_given():
    plain = turn_body(TurnRequest("r", [1], SamplingParams(top_k=0), 8), "1:r", None)
    assert not {"extra_key", "lora_path"} & set(plain) and "sampling_seed" not in plain["sampling_params"]
    assert plain["sampling_params"]["top_k"] == -1 and plain["sampling_params"]["max_new_tokens"] == 8
    named = turn_body(TurnRequest("r", [1], SamplingParams(), 8, cache_salt="v3", adapter="policy-3"), "1:r", 11)
    assert named["extra_key"] == "v3" and named["lora_path"] == "policy-3"
    assert named["sampling_params"]["sampling_seed"] == 11
