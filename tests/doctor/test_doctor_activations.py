"""Estimated activations, compared with the bytes that autograd keeps."""

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from mtrl.config.model_schema import ModelConfig
from mtrl.doctor.activations import adapter_bytes, layer_bytes
from mtrl.doctor.architecture import Architecture
from mtrl.models.lora import add_adapters
from mtrl.models.preparation import checkpoint_gradients

SIZES = dict(
    hidden_size=64,
    intermediate_size=160,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=97,
    tie_word_embeddings=False,
    max_position_embeddings=512,
)
EXPERTS = dict(num_local_experts=4, num_experts_per_tok=2)
LENGTH = 32


def build(kind, layers, dtype, attention):
    more = {
        "gpt_oss": EXPERTS | {"layer_types": ["full_attention"] * layers},
        "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96},
    }.get(kind, {})
    config = CONFIG_MAPPING[kind](**SIZES, **more, num_hidden_layers=layers)
    return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention).eval()


def kept(model):
    """Return the bytes of the tensors that are saved for the backward pass, without parameters and duplicates."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    found = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = (storage.nbytes(), tensor)  # kept alive, so that no address is reused
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        ids = torch.arange(2 * LENGTH).view(2, LENGTH) % SIZES["vocab_size"]
        loss = model(input_ids=ids, use_cache=False).logits
    del loss
    return sum(size for size, _ in found.values())


def of_one_layer(make):
    """Return the bytes per token that a second layer adds."""
    return (kept(make(2)) - kept(make(1))) / (2 * LENGTH)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("kind", "attention"),
    [(kind, attention) for kind in ("qwen2", "qwen3", "llama", "qwen3_moe") for attention in ("sdpa", "eager")]
    + [("gpt_oss", "eager")],
)
def test_the_estimate_matches_the_saved_tensors_of_a_layer(kind, attention, dtype):
    model = build(kind, 1, dtype, attention)
    estimate = layer_bytes(Architecture.of(model.config.to_dict(), kind), dtype.itemsize, LENGTH, attention)
    measured = of_one_layer(lambda layers: build(kind, layers, dtype, attention))
    assert measured == pytest.approx(estimate, abs=1)  # a mixture also saves a few numbers per expert


@pytest.mark.parametrize("same", [True, False])
def test_the_estimate_matches_the_saved_tensors_of_adapters(same):
    """`same`: they compute in what the model does, as FSDP2 lets them; else inputs are cast to float32 first."""
    dtype = torch.float32 if same else torch.bfloat16
    settings = ModelConfig(lora_rank=4)

    def make(layers):
        return add_adapters(build("llama", layers, dtype, "sdpa"), settings)

    architecture = Architecture.of(build("llama", 1, dtype, "sdpa").config.to_dict(), "llama")
    estimate = layer_bytes(architecture, dtype.itemsize, LENGTH) + adapter_bytes(architecture, 4, 4, cast=not same)
    assert 0.8 * estimate < of_one_layer(make) <= estimate  # frozen norms save a little less


def test_a_recomputed_layer_saves_its_input_only():
    def stored(recomputed):
        model = build("qwen3", 3, torch.float32, "sdpa")
        checkpoint_gradients(model, recomputed)
        return kept(model) / (2 * LENGTH)

    shape = build("qwen3", 1, torch.float32, "sdpa").config
    saving = layer_bytes(Architecture.of(shape.to_dict(), "qwen3"), 4, LENGTH) - 4 * shape.hidden_size
    assert stored(1) - stored(2) == saving
