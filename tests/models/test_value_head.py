"""The value model: values are 0 at first, and are computed from the last hidden state of the body."""

import copy

import pytest
import torch
from torch import nn
from transformers import Gemma2Config, Gemma2ForCausalLM, GPT2Config, GPT2LMHeadModel

from mtrl.errors import UserError
from mtrl.models.value_head import ValueModel

IDS = torch.arange(12).reshape(2, 6)
CHOSEN = torch.tensor([[0, 1, 0, 0, 1, 1], [1, 0, 0, 0, 0, 0]]).bool()


def with_a_head(model, seed=0):
    """Return the value model of a model, with random weights of the head."""
    model = ValueModel(model)
    with torch.no_grad():
        model.head.weight.normal_(generator=torch.Generator().manual_seed(seed))
        model.head.bias.fill_(0.5)
    return model


def test_a_new_critic_returns_0_and_its_head_has_gradients(make_tiny_model):
    model = ValueModel(make_tiny_model(1))
    values = model(CHOSEN, input_ids=IDS)
    assert values.shape == (4,) and not values.any()
    values.sum().backward()
    assert model.head.weight.grad.abs().sum() > 0


def test_values_are_computed_from_the_last_hidden_state(make_tiny_model):
    lm = make_tiny_model(2)
    hidden = lm(IDS, output_hidden_states=True).hidden_states[-1]
    model = with_a_head(copy.deepcopy(lm))
    expected = (hidden @ model.head.weight[0] + 0.5)[CHOSEN]
    torch.testing.assert_close(model(CHOSEN, input_ids=IDS), expected)


def test_the_value_model_has_no_head_over_the_vocabulary(make_tiny_model):
    lm = make_tiny_model()
    model = ValueModel(lm)
    assert not any(p.shape[0] == lm.vocab_size and name != "body.embed_tokens.weight" for name, p in _named(model))
    assert sum(p.numel() for _, p in _named(model)) == sum(p.numel() for p in lm.base_model.parameters()) + 33


def _named(model):
    return list(model.named_parameters())


def test_operations_on_logits_are_not_applied_to_values():
    """Gemma 2 limits its logits by a soft cap; values may have any size."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Gemma2Config(vocab_size=20, head_dim=8, num_key_value_heads=1, final_logit_softcapping=2.0, **sizes)
    model = with_a_head(Gemma2ForCausalLM(config).eval())
    with torch.no_grad():
        model.head.bias.fill_(100.0)
    assert (model(CHOSEN, input_ids=IDS) > 50).all()


@pytest.mark.parametrize(("dtype", "head"), [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)])
def test_the_head_has_at_least_single_precision(dtype, head):
    lm = GPT2LMHeadModel(GPT2Config(vocab_size=20, n_embd=8, n_layer=1, n_head=2)).eval().to(dtype)
    values = with_a_head(lm)(CHOSEN, input_ids=IDS)
    assert values.dtype == head and values.isfinite().all()


def test_an_architecture_without_a_body_is_a_user_error():
    class Whole(nn.Module):
        @property
        def base_model(self):
            return self

    with pytest.raises(UserError, match="Whole has no body apart from its head.*algorithm.critic.path"):
        ValueModel(Whole())
