"""Gradient checkpointing computes the same numbers, although a model asks for dropout in training: for any number of
recomputed layers, and with their inputs in CPU memory."""

import copy
import warnings
import weakref

import pytest
import torch
from transformers import Gemma3Config, Gemma3ForConditionalGeneration, Qwen3Config, Qwen3ForCausalLM

from mtrl.errors import UserError
from mtrl.models.preparation import checkpoint_gradients, prepare_packing

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16, "vocab_size": 50,
         "num_attention_heads": 2, "num_key_value_heads": 2}  # fmt: skip


def twins(*settings):
    """Return a model with dropout of 0.5 in its attention, and a copy that recomputes activations."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        plain = Qwen3ForCausalLM(Qwen3Config(**SIZES, attention_dropout=0.5)).eval()
    saving = copy.deepcopy(plain)
    checkpoint_gradients(saving, *settings)
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


def gradients(model, ids):
    logprobs(model, ids).square().sum().backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("count", [1, 2, None])
def test_any_number_of_layers_may_be_recomputed_with_or_without_their_inputs_on_the_cpu(count, offload):
    plain, saving = twins(count, offload)
    ids = torch.randint(0, 50, (1, 12))
    passes = []
    for index, layer in enumerate(saving.model.layers):
        layer.self_attn.register_forward_hook(lambda *_, index=index: passes.append(index))
    found = gradients(copy.deepcopy(saving), ids), gradients(saving, ids)
    expected = gradients(plain, ids)
    for one in found:  # also of a copy, such as a reference
        assert all(torch.equal(mine, truth) for mine, truth in zip(one, expected, strict=True))
    once = [0, 1, *reversed(range(count or 2))]  # the backward pass reaches the last layer first
    assert passes == 2 * once


@pytest.mark.parametrize("offload", [False, True])
def test_the_input_of_a_recomputed_layer_is_freed_if_it_is_in_cpu_memory(offload):
    _, saving = twins(None, offload)
    inputs = []
    saving.model.layers[1].register_forward_pre_hook(lambda _, args: inputs.append(weakref.ref(args[0])))
    kept = logprobs(saving, torch.randint(0, 50, (1, 12)))
    assert (inputs[0]() is None) == offload
    kept.sum().backward()


def test_impossible_numbers_of_layers_are_refused():
    with pytest.raises(UserError, match="recomputed_layers=3 is more than the 2 layers of Qwen3ForCausalLM; lower it"):
        twins(3)

    class Other(torch.nn.Module):
        def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs=None):
            self.gradient_checkpointing = True

    with pytest.raises(UserError, match="recomputed_layers=1: Other recomputes all its layers or none; set"):
        checkpoint_gradients(Other(), 1)
    with pytest.raises(UserError, match="activation_offload=true: the layers of Other are not recomputed by"):
        checkpoint_gradients(Other(), offload=True)


def test_only_the_layers_are_in_training_mode():
    _, saving = twins()
    training = {type(module).__name__ for module in saving.modules() if module.training}
    assert training == {"Qwen3Model", "Qwen3DecoderLayer"}
    _, partly = twins(1)
    assert [layer.training for layer in partly.model.layers] == [True, False]


def test_layers_of_an_image_encoder_are_not_counted():
    text = {**SIZES, "sliding_window": 8}
    images = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2}
    images |= {"image_size": 28, "patch_size": 14}
    model = Gemma3ForConditionalGeneration(Gemma3Config(text_config=text, vision_config=images, mm_tokens_per_image=4))
    checkpoint_gradients(model.eval(), 1)
    assert [layer.training for layer in model.get_decoder().layers] == [True, False]
    with pytest.raises(UserError, match="recomputed_layers=3 is more than the 2 layers of"):
        checkpoint_gradients(model, 3)


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
