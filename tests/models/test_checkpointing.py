"""Gradient checkpointing computes the same numbers, although a model asks for dropout in training."""

import copy

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from mtrl.models.checkpointing import checkpoint_gradients


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
def test_it_recomputes_and_drops_nothing():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "attention_dropout": 0.5}
    plain = Qwen3ForCausalLM(Qwen3Config(vocab_size=50, **sizes, **heads)).eval()
    saving = copy.deepcopy(plain)
    checkpoint_gradients(saving)
    passes = []
    saving.model.layers[0].self_attn.register_forward_hook(lambda *_: passes.append(1))
    ids = torch.randint(0, 50, (2, 12))
    for model in (plain, saving):
        model(ids, use_cache=False).logits.square().sum().backward()
    assert len(passes) == 2  # once forward, once again in the backward pass
    for expected, found in zip(plain.parameters(), saving.parameters(), strict=True):
        assert torch.equal(expected.grad, found.grad)
