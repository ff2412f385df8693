"""Gradient checkpointing computes the same numbers, although a model asks for dropout in training."""

import copy
import warnings

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from mtrl.models.preparation import checkpoint_gradients, prepare_packing

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16, "vocab_size": 50,
         "num_attention_heads": 2, "num_key_value_heads": 2}  # fmt: skip


def twins():
    """Return a model with dropout of 0.5 in its attention, and a copy that recomputes activations."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        plain = Qwen3ForCausalLM(Qwen3Config(**SIZES, attention_dropout=0.5)).eval()
    saving = copy.deepcopy(plain)
    checkpoint_gradients(saving)
    return plain, saving


def logprobs(model, ids, **inputs):
    return model(ids, use_cache=False, **inputs).logits.log_softmax(-1)


PACKED = torch.tensor([[*range(5), *range(7)]])
"""Positions of two samples in one row."""


@pytest.mark.parametrize("inputs", [{}, {"position_ids": PACKED}], ids=["padded", "packed"])
def test_activations_are_recomputed_without_dropout(inputs):
    plain, saving = twins()
    passes = []
    saving.model.layers[0].self_attn.register_forward_hook(lambda *_: passes.append(1))
    ids = torch.randint(0, 50, (1, 12))
    expected, found = (logprobs(model, ids, **inputs) for model in (plain, saving))
    assert torch.equal(expected, found)
    assert len(passes) == 1
    for values in (expected, found):
        values.square().sum().backward()
    assert len(passes) == 2  # the backward pass computes the layer again
    for one, other in zip(plain.parameters(), saving.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_only_the_layers_are_in_training_mode():
    _, saving = twins()
    training = {type(module).__name__ for module in saving.modules() if module.training}
    assert training == {"Qwen3Model", "Qwen3DecoderLayer"}


def test_packed_samples_stay_apart():
    prepare_packing(twins()[1])


def test_no_deprecated_method_is_called():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        twins()


def test_the_older_method_name_is_used_where_it_is_the_only_one():
    class Early(torch.nn.Module):
        def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs=None):
            self.asked = gradient_checkpointing_kwargs

    model = Early()
    checkpoint_gradients(model)
    assert model.asked == {"use_reentrant": False}
