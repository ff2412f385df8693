"""Attention of all pieces of a pack in one call, with the kernel replaced by its definition, since it needs a GPU. The
self-test of the doctor compares packed with padded samples by the kernel itself (`update bfloat16`)."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AttentionInterface

from mtrl.models import varlen
from mtrl.models.attention import OWN, pieces, use_own_attention
from mtrl.models.varlen import Boundaries


def definition(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size, **_):
    """Causal attention of each piece, aligned to its last key, of queries [L, heads, dim] to keys [K, heads, dim]."""
    assert window_size == (-1, 0) and cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    parts = []
    for (start, end), (first, last) in zip(pairwise(cu_seq_q.tolist()), pairwise(cu_seq_k.tolist()), strict=True):
        assert 0 < end - start <= max_q and end - start <= last - first <= max_k
        groups = query.shape[1] // key.shape[1]
        keys, values = (states[first:last].repeat_interleave(groups, 1) for states in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query[start:end], keys) * scale
        later = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1 + scores.shape[2] - scores.shape[1])
        weights = scores.masked_fill(later, float("-inf")).softmax(-1)
        parts.append(torch.einsum("hqk,khd->qhd", weights, values))
    return torch.cat(parts)


@st.composite
def packs(draw):
    """Positions of a pack: each piece begins at 0 or continues the first tokens of the sample before it."""
    length, spans = 0, []
    for _ in range(draw(st.integers(2, 6))):
        start = draw(st.integers(0, length))
        length = start + draw(st.integers(1, 7))
        spans.append((start, length))
    return torch.cat([torch.arange(*span) for span in spans])[None]


class Module:
    is_causal, training, num_key_value_groups = True, False, 2


@pytest.fixture(scope="module")
def attend(make_tiny_model):
    """The attention of a switched model, as its layers get it from Transformers."""
    assert use_own_attention(make_tiny_model())
    return AttentionInterface()[OWN]


@settings(max_examples=60, deadline=None)
@given(positions=packs(), seed=st.integers(0, 99))
def test_one_call_equals_attention_piece_by_piece(attend, positions, seed):
    length, generator = positions.shape[1], torch.Generator().manual_seed(seed)
    states = [torch.randn(1, heads, length, 8, generator=generator, dtype=torch.float64) for heads in (4, 2, 2)]
    upstream = torch.randn(1, length, 4, 8, generator=generator, dtype=torch.float64)

    def run(at_once):
        inputs = [state.clone().requires_grad_() for state in states]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(varlen, "varlen_attn", definition)
            patch.setattr(varlen, "fits", lambda query: at_once)
            outputs, _ = attend(Module(), *inputs, None, position_ids=positions, scaling=0.3)
        return outputs, *torch.autograd.grad(outputs, inputs, upstream)

    for one, other in zip(run(True), run(False), strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-6)  # gathered gradients are added in float32


def test_boundaries_of_a_group_with_one_prompt():
    row = pieces(torch.tensor([[0, 1, 2, 3, 4, 3, 4, 5, 0, 1]]))  # a prompt of three tokens, and another sample
    found = Boundaries.of(row, torch.device("cpu"))
    assert found.queries.tolist() == [0, 5, 8, 10]
    assert found.keys.tolist() == [0, 5, 11, 13]
    assert found.gathered.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 5, 6, 7, 8, 9]
    assert (found.most_queries, found.most_keys) == (5, 6)


def test_nothing_is_gathered_without_shared_prefixes():
    found = Boundaries.of(pieces(torch.tensor([[0, 1, 2, 0, 1]])), torch.device("cpu"))
    assert found.gathered is None and found.queries.tolist() == found.keys.tolist() == [0, 3, 5]


def test_the_kernel_is_not_used_on_a_cpu():
    assert not varlen.fits(torch.ones(1, 2, 3, 8, dtype=torch.bfloat16))


def test_cudnn_attention_is_off():
    assert not torch.backends.cuda.cudnn_sdp_enabled()
