"""Attention by products of bfloat16 gives what `eager` and `sdpa` give, and is used only where it is faster."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers as hf

from mtrl.models import attention
from mtrl.models.attention import ONEDNN, OWN, multiplies, use_own_attention
from mtrl.models.preparation import prepare_packing

SIZES = {
    "vocab_size": 90,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
}
MODELS = {
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**SIZES, head_dim=32)),
    "gpt2": lambda: hf.GPT2LMHeadModel(
        hf.GPT2Config(vocab_size=90, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.2)
    ),
}
LEFT, NONE = [[0] * 4 + [1] * 7, [1] * 11, [0] + [1] * 10], None


def build(name, dtype=torch.bfloat16, implementation="sdpa"):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = MODELS[name]().eval().to(dtype)
    model.set_attn_implementation(implementation)
    return model


def learn(model, mask):
    """Return log-probs of tokens other than padding, and the gradients of their mean, in float32."""
    ids = torch.randint(90, (3, 11), generator=torch.Generator().manual_seed(1))
    given = torch.ones_like(ids) if mask is None else torch.tensor(mask)
    inputs = {} if mask is None else {"attention_mask": given}
    logits = model(input_ids=ids, use_cache=False, **inputs).logits[:, :-1].float()
    logprobs = torch.log_softmax(logits, -1).gather(-1, ids[:, 1:, None])[..., 0]
    logprobs = logprobs[given[:, :-1] == 1]
    logprobs.mean().backward()
    return logprobs.detach(), torch.cat([p.grad.float().flatten() for p in model.parameters()])


def multiplied(monkeypatch):
    """Return a list to which the shapes of all multiplied queries are appended."""
    shapes, plain = [], attention.products

    def watched(query, *rest):
        shapes.append(query.shape)
        return plain(query, *rest)

    monkeypatch.setattr(attention, "products", watched)
    monkeypatch.setattr(attention, "multiplies", lambda dtype: dtype == torch.bfloat16)
    return shapes


@pytest.mark.parametrize("mask", [NONE, LEFT], ids=["no padding", "padding on the left"])
@pytest.mark.parametrize("name", MODELS)
def test_products_are_about_as_exact_as_eager_attention(name, mask, monkeypatch):
    shapes = multiplied(monkeypatch)
    own = build(name)
    assert use_own_attention(own)
    exact = learn(build(name).float(), mask)
    found, eager = learn(own, mask), learn(build(name, implementation="eager"), mask)
    assert len(shapes) == 2, "one for each layer"
    for truth, mine, theirs in zip(exact, found, eager, strict=True):
        assert torch.isfinite(mine).all()
        assert 0 < (mine - truth).norm() < 1.5 * (theirs - truth).norm() < 0.1 * truth.norm()


def test_products_are_computed_sample_by_sample(monkeypatch):
    shapes, model = multiplied(monkeypatch), build("qwen3")
    prepare_packing(model)
    shapes.clear()
    lengths = [5, 1, 9]
    ids = torch.randint(90, (1, 15), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    assert [shape[2] for shape in shapes] == lengths * 2
    alone = [model(input_ids=part, use_cache=False).logits for part in ids.split(lengths, 1)]
    torch.testing.assert_close(logits, torch.cat(alone, 1), atol=0.05, rtol=0.05)


@pytest.mark.parametrize("case", ["float32", "long", "cached"])
def test_sdpa_is_used_where_products_are_not_faster(case, monkeypatch):
    shapes, model = multiplied(monkeypatch), build("qwen3", torch.float32 if case == "float32" else torch.bfloat16)
    if case == "long":
        monkeypatch.setattr(attention, "SCORES", 4 * 11**2 - 1)
    use_own_attention(model)
    ids = torch.randint(90, (1, 11), generator=torch.Generator().manual_seed(1))
    if case == "cached":
        cache = model(input_ids=ids[:, :-1]).past_key_values
        shapes.clear()
        model(input_ids=ids[:, -1:], past_key_values=cache)
    else:
        model(input_ids=ids)
    assert not shapes and model.config._attn_implementation == OWN


@pytest.mark.parametrize("more", [{"dropout": 0.1}, {"is_causal": False}, {"position_bias": torch.zeros(1, 1, 5, 5)}])
def test_attention_that_needs_more_than_causal_products_uses_sdpa(more, monkeypatch):
    shapes, model = multiplied(monkeypatch), build("qwen3")
    use_own_attention(model)
    attend, states = hf.AttentionInterface()[OWN], torch.ones(3, 1, 4, 5, 32, dtype=torch.bfloat16)
    nothing = {"dropout": 0.0, "scaling": 0.1, "is_causal": None, "position_bias": None}
    attend(model.model.layers[0].self_attn, *states, None, **nothing)
    assert len(shapes) == 1
    attend(model.model.layers[0].self_attn, *states, None, **nothing | more)
    assert len(shapes) == 1


def saved_by(model, **inputs):
    """Return logits, the gradients of their squares, and the most numbers of a tensor that the forward pass stores."""
    sizes = []

    def pack(tensor):
        sizes.append(tensor.untyped_storage().nbytes() // 4)
        return tensor

    model.zero_grad()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        logits = model(use_cache=False, **inputs).logits
    logits.square().mean().backward()
    return logits.detach(), torch.cat([p.grad.flatten() for p in model.parameters()]), max(sizes)


def test_attention_of_a_long_sample_stores_no_scores():
    model = build("qwen3", torch.float32)
    use_own_attention(model)
    length = 1024
    ids = torch.randint(90, (1, length), generator=torch.Generator().manual_seed(1))
    assert saved_by(model, input_ids=ids)[2] <= 4 * 64 * length < length**2


def test_a_long_piece_with_a_context_stores_no_mask(monkeypatch):
    """Its gradients and those of the context are those with a mask."""
    model = build("qwen3", torch.float32)
    prepare_packing(model)
    first, context, length = 700, 600, 1000
    ids = torch.randint(90, (1, first + length - context), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(first), torch.arange(context, length)])[None]
    inputs = {"input_ids": ids, "position_ids": positions}
    *masked, largest = saved_by(model, **inputs)
    assert largest == (length - context) * length
    monkeypatch.setattr(attention, "MASKED", (length - context) * length - 1)
    *found, largest = saved_by(model, **inputs)
    assert largest <= 128 * (first + length)
    for truth, mine in zip(masked, found, strict=True):
        torch.testing.assert_close(mine, truth, atol=1e-5 * float(truth.abs().max()), rtol=0)


CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
PRODUCTS = """
import sys
import torch
import mtrl.models.attention

weight = torch.ones(64, 64, dtype=torch.bfloat16)

def multiply(rows):
    torch.nn.functional.linear(torch.ones(rows, 64, dtype=torch.bfloat16), weight)

for shapes in map(int, sys.argv[1:]):
    for rows in range(2, 2 + shapes):
        multiply(rows)
    print("again", flush=True)
    multiply(2)
    print("next", flush=True)
"""


def are_compiled_again(*shapes, **environment):
    """Return for each number of shapes whether the kernel of the first is compiled again after the products of all, by
    what oneDNN reports."""
    others = {name: value for name, value in os.environ.items() if name not in CACHES}
    others |= {"ONEDNN_VERBOSE": "profile_create", **environment}
    command = [sys.executable, "-c", PRODUCTS, *map(str, shapes)]
    output = subprocess.run(command, env=others, check=True, capture_output=True, text=True).stdout
    parts = [part.split("again") for part in output.split("next")[:-1]]
    assert parts[0][0].count("cache_miss") >= shapes[0]
    return ["cache_miss" in again for _, again in parts]


@pytest.mark.skipif(
    not (ONEDNN and torch.ops.mkldnn._is_mkldnn_bf16_supported()),
    reason="oneDNN multiplies no bfloat16 on this processor",
)
@pytest.mark.ci
def test_the_cache_of_shapes_is_small_unless_the_user_sets_its_size():
    assert are_compiled_again(4, 130) == [False, True]
    assert are_compiled_again(4, **dict.fromkeys(CACHES, "2")) == [True]


@pytest.mark.parametrize(
    ("avx512_bf16", "amx", "found"), [(False, False, False), (True, False, True), (False, True, True)]
)
def test_avx512_without_instructions_for_bfloat16_does_not_count(monkeypatch, avx512_bf16, amx, found):
    """oneDNN supports bfloat16 with AVX-512 alone, by conversions to float32 that take several times as long."""
    monkeypatch.setattr(attention, "ONEDNN", True)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    monkeypatch.setattr(attention.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512_bf16)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    assert multiplies(torch.bfloat16) is found
    assert not multiplies(torch.float32)
    monkeypatch.setattr(attention.platform, "machine", lambda: "aarch64")
    assert multiplies(torch.bfloat16)


def test_the_processor_multiplies_what_its_flags_say():
    cpuinfo = Path("/proc/cpuinfo")
    flags = cpuinfo.read_text().partition("\nflags")[2].partition("\n")[0].split() if cpuinfo.exists() else []
    if not flags:
        pytest.skip("no /proc/cpuinfo with flags of an x86 processor")
    assert multiplies(torch.bfloat16) == bool(ONEDNN and {"avx512_bf16", "amx_bf16"} & set(flags))
