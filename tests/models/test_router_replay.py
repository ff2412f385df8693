"""Router replay: the given experts, with the weights of the model's own routers."""

import pytest
import torch
import transformers as hf

from mtrl.errors import UserError
from mtrl.models.experts import chosen_experts, recorded, routers_of
from mtrl.models.preparation import checkpoint_gradients
from mtrl.models.router_replay import RouterReplay

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 61}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.5}
EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 8}
GROUPS = {"n_group": 4, "topk_group": 2, "n_routed_experts": 8, "num_experts_per_tok": 2, "first_k_dense_replace": 1}
MIXTURES = {
    "qwen3_moe": lambda: hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**SIZES, **EXPERTS, moe_intermediate_size=24)),
    "gpt_oss": lambda: hf.GptOssForCausalLM(hf.GptOssConfig(**SIZES, **EXPERTS, head_dim=8)),
    "mixtral": lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**SIZES, **EXPERTS)),
    "glm4_moe": lambda: hf.Glm4MoeForCausalLM(hf.Glm4MoeConfig(**SIZES, **GROUPS, moe_intermediate_size=24)),
}
"""Architectures whose routers differ: softmax before the choice, softmax after it, and sigmoid with groups."""
IDS = torch.randint(61, (2, 7), generator=torch.Generator().manual_seed(0))


def make(kind, dtype=torch.float32):
    torch.manual_seed(0)
    return MIXTURES[kind]().eval().to(dtype)


def foreign(model, seed=1):
    """Return random choices [2, 7, layers, 2] of different experts."""
    layers, draw = len(routers_of(model)), torch.Generator().manual_seed(seed)
    return torch.rand(2, 7, layers, 8, generator=draw).argsort(-1)[..., :2].to(torch.int8)


def trained(model, experts=None):
    """Return the logits, and the gradients of a loss, with given experts or the model's own; the gradient of a
    parameter without one is None."""
    model.zero_grad()
    if experts is None:
        logits = model(input_ids=IDS).logits
        logits.log_softmax(-1)[..., 3].sum().backward()
    else:
        with RouterReplay(model).replaying(experts):
            logits = model(input_ids=IDS).logits
            logits.log_softmax(-1)[..., 3].sum().backward()
    return logits.detach(), [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def assert_equal(one, other):
    torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", MIXTURES)
def test_a_models_own_choices_change_no_bit(kind, dtype):
    model = make(kind, dtype)
    with recorded(routers_of(model)) as routing:
        model(input_ids=IDS)
    own = chosen_experts(routing).unflatten(0, IDS.shape)
    assert own.dtype == torch.int8
    expected = trained(model)
    assert_equal(trained(model, own), expected)
    assert_equal(trained(model, torch.full_like(own, -1)), expected)
    assert not any("forward" in vars(router) for router in routers_of(model))


def weights_by_hand(kind, router, hidden, ids):
    """Return the weights of the experts by the formulas of the papers."""
    if kind == "glm4_moe":
        chosen = (hidden @ router.weight.T).sigmoid().gather(-1, ids)
        return chosen / chosen.sum(-1, keepdim=True) * router.routed_scaling_factor
    each = torch.nn.functional.linear(hidden, router.weight, getattr(router, "bias", None)).exp()
    chosen = each.gather(-1, ids)
    return chosen / (each if kind == "qwen3_moe" else chosen).sum(-1, keepdim=True)


@pytest.mark.parametrize("kind", MIXTURES)
def test_routers_use_given_experts_as_written_by_hand(kind, monkeypatch):
    """The second model's routers are replaced by functions of a few lines. Gradients of routers are among those
    compared."""
    model, by_hand = make(kind), make(kind)
    experts = foreign(model)
    for layer, router in enumerate(routers_of(by_hand)):
        ids = experts.long().flatten(0, 1)[:, layer]

        def forward(hidden, router=router, ids=ids):
            hidden = hidden.reshape(-1, 32)
            return hidden, weights_by_hand(kind, router, hidden, ids), ids

        monkeypatch.setattr(router, "forward", forward)
    found, expected = trained(model, experts), trained(by_hand)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
    own = trained(model)
    assert (found[0] - own[0]).abs().max() > 0.1, "or the choices do not matter"
    routers = {id(p) for router in routers_of(model) for p in router.parameters()}
    gradients = [g for p, g in zip(model.parameters(), found[1], strict=True) if id(p) in routers]
    assert gradients and all(gradient.abs().max() > 0 for gradient in gradients)


def test_one_token_of_a_router_may_choose_by_itself():
    model = make("qwen3_moe")
    experts = foreign(model)
    experts[1] = -1
    found, own = trained(model, experts)[0], trained(model)[0]
    torch.testing.assert_close(found[1], own[1], rtol=1e-5, atol=1e-5)
    assert (found[0] - own[0]).abs().max() > 0.1


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_recomputed_activations_replay_too(kind):
    stored, recomputed = make(kind), make(kind)
    checkpoint_gradients(recomputed)
    experts = foreign(stored)
    assert_equal(trained(recomputed, experts), trained(stored, experts))


def test_another_number_of_layers_or_choices_is_refused():
    model = make("qwen3_moe")
    experts = foreign(model)
    with pytest.raises(UserError, match="experts of 1 layers, and the policy has 2"):
        trained(model, experts[:, :, :1])
    with pytest.raises(UserError, match=r"recorded \[14, 1\] choices of experts, and a router .* makes \[14, 2\]"):
        trained(model, experts[..., :1])
    with pytest.raises(UserError, match=r"recorded \[12, 2\] choices"):
        trained(model, experts[:, 1:])


def by_sorting(router, hidden):
    logits = hidden @ router.weight.T
    weights, ids = logits.sort(-1, descending=True)
    return logits, weights[:, :2], ids[:, :2]


def without_ids(router, hidden):
    logits = hidden @ router.weight.T
    return logits, logits.topk(2).values


def with_another_input(router, hidden, tokens):
    return hidden @ router.weight.T, *hidden.topk(2)


@pytest.mark.parametrize(
    ("forward", "why"),
    [
        (by_sorting, "it chooses them by other operations than topk"),
        (without_ids, "it returns no ids of experts"),
        (with_another_input, "its router cannot run alone: TypeError"),
    ],
)
def test_other_routers_are_refused(forward, why):
    model = make("qwen3_moe")
    other = type("OtherRouter", (type(routers_of(model)[0]),), {"forward": forward})
    for router in routers_of(model):
        router.__class__ = other
    with pytest.raises(UserError) as caught:
        RouterReplay(model)
    assert str(caught.value) == (
        f"algorithm.router_replay=true cannot set the experts that OtherRouter chooses ({why}); set "
        "algorithm.router_replay=false"
    )
