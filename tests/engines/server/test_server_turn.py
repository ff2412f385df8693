"""A turn over several requests, and invalid answers."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtrl.engines.base import SamplingParams
from mtrl.engines.server.server_api import ServerError
from mtrl.engines.server.turn import PartialTurn, check_answer
from mtrl.types import FinishReason, Generation

PROMPT = [5, 6]


@given(parts=st.lists(st.integers(0, 6), min_size=1, max_size=8), room=st.integers(1, 30))
def test_parts_become_one_turn(parts, room):
    """The turn has each token once and in order, with its log-prob and version, and not more tokens than allowed."""
    turn, sampled, whole = PartialTurn(PROMPT, SamplingParams(), room), [], None
    for version, size in enumerate(parts):
        request = turn.request("name", "salt", None)
        assert request.prompt == PROMPT + sampled and request.max_tokens == room - len(sampled) > 0
        size = min(size, request.max_tokens)
        new = [100 * version + i for i in range(size)]
        is_last = version == len(parts) - 1
        finish = FinishReason.STOP if is_last else FinishReason.ABORT
        answer = Generation(new, [-float(i) for i in new], finish, [(version // 2, size)], cached_tokens=version)
        sampled += new
        whole = turn.add(answer)
        if whole is not None:
            break
    assert whole is not None
    assert whole.token_ids == sampled and whole.logprobs == [-float(i) for i in sampled]
    versions = [version for version, count in whole.version_spans for _ in range(count)]
    assert versions == [token // 100 // 2 for token in sampled]
    assert len({version for version, _ in whole.version_spans}) == len(whole.version_spans)
    assert whole.finish == (FinishReason.STOP if is_last else FinishReason.LENGTH)


@pytest.mark.parametrize("finish", [FinishReason.LENGTH, FinishReason.ABORT])
def test_a_turn_that_ends_with_a_stop_token_has_stopped(finish):
    """SGLang tests the limit and aborts before stop tokens, so its answers have these finish reasons."""
    turn = PartialTurn(PROMPT, SamplingParams(stop_token_ids=(9,)), 2 if finish == FinishReason.LENGTH else 8)
    whole = turn.add(Generation([4, 9], [-0.5, -1.0], finish, [(0, 2)]))
    assert whole is not None and whole.token_ids == [4, 9] and whole.finish == FinishReason.STOP


GOOD = Generation([1, 2], [-0.5, -1.0], FinishReason.STOP, [(0, 2)])


def test_a_valid_answer_is_accepted():
    check_answer(GOOD, PartialTurn(PROMPT, SamplingParams(), 2).request("a", None, None), 3)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"token_ids": [1, 2, 0]}, "3 tokens where at most 2"),
        ({"token_ids": [1, 3]}, "token id 3, and the model's largest id is 2"),
        ({"token_ids": [1, -1]}, "token id -1"),
        ({"token_ids": [1, "2"]}, "token id '2'"),
        ({"logprobs": [-0.5]}, "2 tokens with 1 log-probs and versions of 2"),
        ({"version_spans": [(0, 1)]}, "2 tokens with 2 log-probs and versions of 1"),
        ({"logprobs": [-0.5, math.nan]}, "not finite"),
    ],
)
def test_invalid_answers_are_refused(change, words):
    request = PartialTurn(PROMPT, SamplingParams(), 2).request("a", None, None)
    with pytest.raises(ServerError, match=words):
        check_answer(replace(GOOD, **change), request, 3)
