"""Models that cannot be divided among ranks are refused in one sentence, before their weights are loaded."""

import pytest
import torch
from torch.torch_version import TorchVersion
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.distributed.mixin import DistributedMixin

from mtrl.distributed.meshes import WHOLE, ModelParallel
from mtrl.distributed.plans import check_version, plans_of
from mtrl.errors import UserError
from tests.divided_models import CAN_DIVIDE

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "head_dim": 8, "vocab_size": 53}
SIZES |= {"num_attention_heads": 8, "num_key_value_heads": 4}


def made(kind):
    with torch.device("meta"):
        if kind == "dense":
            return Qwen3ForCausalLM(Qwen3Config(**SIZES))
        if kind == "experts":
            return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, num_experts=6, moe_intermediate_size=24))
        if kind == "unproven":
            return Phi3ForCausalLM(Phi3Config(**SIZES, pad_token_id=0))
        return GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=53))


@CAN_DIVIDE
@pytest.mark.parametrize(
    ("kind", "parallel"),
    [
        ("dense", ModelParallel(4)),
        ("experts", ModelParallel(1, 6)),
        ("experts", ModelParallel(2, 2)),
        ("experts", ModelParallel(2, 6)),
    ],
)
def test_models_with_a_plan_are_accepted(kind, parallel):
    plans_of(made(kind), parallel)


@CAN_DIVIDE
@pytest.mark.parametrize(
    ("kind", "parallel", "said"),
    [
        (
            "without",
            ModelParallel(2),
            "trainer.tensor_parallel=2: Transformers has no plan (base_model_tp_plan) for GPT2LMHeadModel; set "
            "trainer.tensor_parallel=1",
        ),
        (
            "dense",
            ModelParallel(1, 2),
            "trainer.expert_parallel=2: Transformers has no plan (base_model_ep_plan) for Qwen3ForCausalLM; set "
            "trainer.expert_parallel=1",
        ),
        (
            "dense",
            ModelParallel(8),
            "trainer.tensor_parallel=8 does not divide the 4 heads of keys and values of Qwen3ForCausalLM; use a "
            "divisor of 4",
        ),
        (
            "experts",
            ModelParallel(1, 4),
            "trainer.expert_parallel=4 does not divide the 6 experts of a layer of Qwen3MoeForCausalLM; use a divisor "
            "of 6",
        ),
        (
            "experts",
            ModelParallel(2),
            "trainer.tensor_parallel=2: Transformers' plan for Qwen3MoeForCausalLM has the style moe_tp_experts, with "
            "which mtrl cannot train and save a model; set trainer.expert_parallel to a multiple of 2",
        ),
        (
            "unproven",
            ModelParallel(2),
            "trainer.tensor_parallel=2: Transformers' plan for Phi3ForCausalLM has the style rowwise_split_input, "
            "with which mtrl cannot train and save a model; set trainer.tensor_parallel=1",
        ),
    ],
)
def test_models_that_cannot_be_divided(kind, parallel, said):
    with pytest.raises(UserError) as caught:
        plans_of(made(kind), parallel)
    assert str(caught.value) == said


def test_older_versions_divide_no_model(monkeypatch):
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.12.1+cu130"))
    check_version(WHOLE)
    with pytest.raises(UserError) as caught:
        check_version(ModelParallel(2, 4))
    assert str(caught.value) == (
        "trainer.tensor_parallel=2 needs PyTorch 2.13 or later, and 2.12.1+cu130 is installed; install a newer one, or "
        "set trainer.tensor_parallel=1"
    )
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.14.0"))
    monkeypatch.delattr(DistributedMixin, "_resolve_parallel_plans", raising=False)
    with pytest.raises(UserError, match="trainer.expert_parallel=4 needs Transformers 5.23 or later, and 5.* is"):
        check_version(ModelParallel(1, 4))
