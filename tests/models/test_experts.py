"""The use of experts: counts of tokens, and the loss that balances them, beside Transformers' own."""

import pytest
import torch
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from mtrl.models.experts import balance_loss, expert_tokens, recorded, routers_of

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8, "vocab_size": 61}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.5}
EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 4}
MIXTURES = {
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **EXPERTS, moe_intermediate_size=24)),
    "gpt_oss": lambda: GptOssForCausalLM(GptOssConfig(**SIZES, **EXPERTS)),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**SIZES, **EXPERTS)),
}


def routed(model, ids):
    with recorded(routers_of(model)) as routing:
        output = model(input_ids=ids, output_router_logits=True)
    return routing, output.router_logits


@pytest.mark.parametrize("kind", MIXTURES)
def test_the_loss_of_a_layer_is_that_of_transformers(kind):
    torch.manual_seed(0)
    routing, logits = routed(MIXTURES[kind]().eval(), torch.randint(61, (2, 9)))
    mask = torch.tensor([[True] * 9, [False] * 4 + [True] * 5])
    assert len(routing) == len(logits) == 2
    expected = [load_balancing_loss_func((one,), 4, 2, mask) for one in logits]
    assert balance_loss(routing, mask.flatten()).item() == pytest.approx(torch.stack(expected).mean().item(), rel=1e-6)


@pytest.mark.parametrize("kind", MIXTURES)
def test_tokens_of_experts_are_counted(kind):
    torch.manual_seed(1)
    routing, logits = routed(MIXTURES[kind]().eval(), torch.randint(61, (1, 12)))
    mask = torch.arange(12) % 3 > 0
    chosen = [one.topk(2, -1).indices for one in logits]
    expected = [[sum(e in ids[row].tolist() for row in range(12) if mask[row]) for e in range(4)] for ids in chosen]
    assert expert_tokens(routing, mask).tolist() == expected


def test_equal_use_is_the_smallest_loss():
    logits = torch.tensor([[9.0, 9, 0, 0], [0, 0, 9, 9]])
    balanced = [(logits, logits.topk(2, -1).indices)]
    one_sided = [(logits[[0, 0]], logits[[0, 0]].topk(2, -1).indices)]
    every = torch.ones(2, dtype=torch.bool)
    assert balance_loss(balanced, every).item() == pytest.approx(2.0)
    assert balance_loss(one_sided, every).item() == pytest.approx(4.0, rel=1e-3)


def test_a_dense_model_has_no_routers_and_hooks_are_removed():
    dense = LlamaForCausalLM(LlamaConfig(**SIZES))
    assert routers_of(dense) == []
    mixture = MIXTURES["qwen3_moe"]()
    with recorded(routers_of(mixture)) as routing:
        mixture(input_ids=torch.zeros(1, 2, dtype=torch.long))
    assert len(routing) == 2
    mixture(input_ids=torch.zeros(1, 2, dtype=torch.long))
    assert len(routing) == 2
