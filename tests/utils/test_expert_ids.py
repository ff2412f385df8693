"""Ids of experts as text, and their rows for turns and samples."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtrl.utils.expert_ids import before_last_tokens, dtype_of, first_rows, from_text, joined, to_text


def ids_of(tokens, layers=2, k=3, experts=8):
    return np.arange(tokens * layers * k).reshape(tokens, layers, k).astype(dtype_of(experts)) % experts


@given(st.sampled_from([2, 128, 129, 512]), st.integers(0, 9), st.integers(1, 3), st.integers(1, 4), st.integers(0, 99))
def test_text_keeps_ids_and_dtype(experts, tokens, layers, k, seed):
    ids = np.random.default_rng(seed).integers(-1, experts, (tokens, layers, k)).astype(dtype_of(experts))
    found = from_text(json.loads(json.dumps(to_text(ids))))
    assert found.dtype == ids.dtype and found.tolist() == ids.tolist()


def test_the_dtype_is_the_narrowest():
    assert [dtype_of(experts) for experts in (8, 128, 129, 384)] == ["int8", "int8", "int16", "int16"]


@pytest.mark.parametrize("text", ["", "int8:1:1", "object:1:1:AA==", "int8:0:1:", "int8:1:2:AAAA", "int8:1:1:A*=="])
def test_other_text_is_refused(text):
    with pytest.raises(ValueError):
        from_text(text)


def test_a_turn_has_the_row_of_the_token_before_each_token():
    computed = ids_of(9)  # of a context of ten tokens
    assert from_text(before_last_tokens(computed, 4)).tolist() == computed[5:].tolist()
    whole = from_text(before_last_tokens(computed, 10))
    assert (whole[0] == -1).all() and whole[1:].tolist() == computed.tolist()
    assert len(from_text(before_last_tokens(computed, 0))) == 0
    assert before_last_tokens(None, 4) is None
    assert from_text(first_rows(before_last_tokens(computed, 4), 3)).tolist() == computed[5:8].tolist()


def test_turns_are_joined_and_missing_ids_are_marked():
    first, last = ids_of(3), ids_of(2, experts=300)
    found = joined([(to_text(first), 3), (None, 2), (to_text(last), 2)])
    assert found.tolist() == [*first.tolist(), *np.full((2, 2, 3), -1).tolist(), *last.tolist()]
    assert found.dtype == "int16"
    assert joined([(None, 3), (None, 1)]) is None
    with pytest.raises(ValueError, match="do not fit turns of"):
        joined([(to_text(first), 4)])
    with pytest.raises(ValueError, match="do not fit turns of"):
        joined([(to_text(first), 3), (to_text(ids_of(2, layers=1)), 2)])
