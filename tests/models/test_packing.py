"""Packed samples attend only to themselves, with and without a dense mask; other models are refused. The order of
samples shares as many tokens of their prefixes as any order."""

from itertools import permutations

import numpy as np
import pytest
import torch
import transformers as hf
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from mtrl.errors import UserError
from mtrl.models import packing
from mtrl.models.attention import OWN, use_own_attention
from mtrl.models.preparation import keeps_apart, prepare_packing
from tests.small_models import SIZES

SMALL = {"vocab_size": 90, "initializer_range": 0.3, "bos_token_id": None, "eos_token_id": None}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
GEMMA = {"head_dim": 8, "sliding_window": 5, "query_pre_attn_scalar": 8}
MODELS = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES)),
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**SIZES, head_dim=16)),
    "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**SMALL, **GPT2)),
    "mistral, sliding": lambda: hf.MistralForCausalLM(hf.MistralConfig(**SIZES, sliding_window=5)),
    "gemma3, half sliding": lambda: hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**SIZES, **GEMMA)),
}
SAMPLE_BY_SAMPLE = ("llama", "qwen3", "gpt2")
LENGTHS = [5, 1, 9, 2]


def build(make, dtype=torch.float32, attention="sdpa"):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = make().eval().to(dtype)
    model.set_attn_implementation(attention)
    return model


def packed():
    ids = torch.randint(90, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(1))
    return ids, torch.cat([torch.arange(length) for length in LENGTHS])[None]


@pytest.mark.parametrize("name", MODELS)
def test_which_models_attend_sample_by_sample(name):
    model = build(MODELS[name])
    assert use_own_attention(model) == (name in SAMPLE_BY_SAMPLE) == (model.config._attn_implementation == OWN)
    assert keeps_apart(model)


@pytest.mark.parametrize("name", SAMPLE_BY_SAMPLE)
def test_logits_and_gradients_equal_those_of_the_dense_mask(name):
    """They also equal those of every sample alone."""
    masked, apart = build(MODELS[name]), build(MODELS[name])
    prepare_packing(apart)
    ids, positions = packed()
    found = [model(input_ids=ids, position_ids=positions, use_cache=False).logits for model in (masked, apart)]
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-5)
    alone = [apart(input_ids=part, use_cache=False).logits for part in ids.split(LENGTHS, 1)]
    torch.testing.assert_close(found[1], torch.cat(alone, 1), atol=1e-5, rtol=1e-5)
    for logits in found:
        logits.square().mean().backward()
    for one, other in zip(masked.parameters(), apart.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, atol=1e-5, rtol=1e-4)


def test_no_dense_mask_is_made(monkeypatch):
    model = build(MODELS["qwen3"])
    prepare_packing(model)
    widths = []
    plain = nn.functional.scaled_dot_product_attention

    def watched(query, key, value, attn_mask=None, **kwargs):
        widths.append((query.shape[2], attn_mask))
        return plain(query, key, value, attn_mask=attn_mask, **kwargs)

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", watched)
    ids, positions = packed()
    model(input_ids=ids, position_ids=positions, use_cache=False)
    assert widths == [(length, None) for length in LENGTHS] * 2


def test_padded_rows_and_generation_are_unchanged():
    """These inputs are no packs: rows of a batch, a mask for padding on the left, and a cache."""
    plain, apart = build(MODELS["qwen3"]), build(MODELS["qwen3"])
    prepare_packing(apart)
    ids = torch.randint(90, (3, 7), generator=torch.Generator().manual_seed(2))
    mask = torch.ones(3, 7, dtype=torch.long)
    mask[0, :3] = 0
    for inputs in ({}, {"attention_mask": mask}):
        logits = [model(input_ids=ids, **inputs).logits[:, -4:] for model in (plain, apart)]
        torch.testing.assert_close(*logits)
    outputs = [model.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False) for model in (plain, apart)]
    assert torch.equal(*outputs)


def test_a_model_whose_layers_get_no_positions_uses_the_dense_mask():
    model = build(MODELS["qwen3"])
    for layer in model.model.layers:
        attention = layer.self_attn
        hidden = attention.forward
        attention.forward = lambda *args, position_ids=None, forward=hidden, **kwargs: forward(*args, **kwargs)
    use_own_attention(model)
    assert not keeps_apart(model)
    model.set_attn_implementation("sdpa")
    prepare_packing(model)
    assert model.config._attn_implementation == "sdpa" and keeps_apart(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_models_that_cannot_pack_are_refused(dtype):
    for make in MODELS.values():
        for attention in ("sdpa", "eager"):
            prepare_packing(build(make, dtype, attention))
    mixed = {"layer_types": ["linear_attention", "full_attention"], "head_dim": 16}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    refused = [
        lambda: hf.MambaForCausalLM(
            hf.MambaConfig(vocab_size=90, hidden_size=32, num_hidden_layers=2, initializer_range=0.3)
        ),
        lambda: hf.BloomForCausalLM(hf.BloomConfig(vocab_size=90, hidden_size=32, n_layer=2, n_head=4)),
        lambda: hf.Qwen3NextForCausalLM(hf.Qwen3NextConfig(**SIZES, **mixed, **experts)),
    ]
    for make in refused:
        model = make().eval().to(dtype)
        name = type(model).__name__
        with pytest.raises(UserError, match=rf"trainer\.packing=true .* {name} .*; set trainer\.packing=false"):
            prepare_packing(model)


def test_a_model_that_takes_no_positions_cannot_pack():
    class NoPositions(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner, self.config, self.device, self.dtype = inner, inner.config, inner.device, inner.dtype

        def forward(self, input_ids, use_cache):
            return self.inner(input_ids=input_ids, use_cache=use_cache)

    with pytest.raises(UserError, match=r"NoPositions .* set trainer\.packing=false"):
        prepare_packing(NoPositions(build(MODELS["qwen3"], attention="eager")))


def row_of(ids, sampled):
    """Return a sequence whose tokens at these indices were sampled."""
    return np.array(ids), np.isin(np.arange(len(ids)), sampled)


TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=7)
ROWS = st.lists(st.tuples(TOKENS, st.integers(0, 7)), min_size=1, max_size=5)


@given(ROWS)
@example([([1, 0], 2), ([1, 1], 1)])
def test_no_other_order_shares_more(drawn):
    rows = [row_of(ids, range(first, len(ids))) for ids, first in drawn]
    shared = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "MIN_PREFIX", 1)
        for order in permutations(range(len(rows))):
            shared[order] = sum(packing.shared_prefixes([rows[index] for index in order]))
    assert shared[tuple(packing.prefix_order(rows))] == max(shared.values())


@pytest.mark.parametrize("edited", [1, 3])
def test_the_sample_of_a_later_turn_continues_that_of_the_turn_before(edited):
    """The prompt of each turn holds the answers before it, whose last tokens were edited, to a smaller or a larger id:
    such a chain is stored in the order of its turns, and each turn adds its own tokens only."""
    turns, prompt = [], [0] * 40
    for _ in range(6):
        turns.append(row_of([*prompt, *[2] * 50], range(len(prompt), len(prompt) + 50)))
        prompt = [*prompt, *[2] * 45, *[edited] * 5]
    order = packing.prefix_order(turns[::-1])
    assert order == [5, 4, 3, 2, 1, 0]
    assert packing.shared_prefixes(turns) == [0, *(40 + 50 * turn + 45 for turn in range(5))]
    (pack,) = packing.partition([[turn] for turn in turns[::-1]], sum(len(ids) for ids, _ in turns[-1:]) + 5 * 10)
    assert pack == order


def test_samples_of_one_prompt_keep_the_order_of_their_tokens():
    rows = [row_of([*[7] * 40, *answer], range(40, 43)) for answer in ([2, 2, 3], [2, 2, 1], [1, 5, 5])]
    assert packing.prefix_order(rows) == [2, 1, 0]


def test_an_order_of_a_thousand_nested_prefixes_is_found():
    rows = [row_of([0] * length, [length - 1]) for length in range(1, 1001)]
    assert packing.prefix_order(rows[::-1]) == [*range(999, -1, -1)]
