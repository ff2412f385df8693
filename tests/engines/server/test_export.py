"""Weights for servers by the names of the model's files."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from mtrl.engines.server.export import FullWeights
from mtrl.errors import UserError
from mtrl.trainer.update.policy import Policy

SIZES = {
    "vocab_size": 64,
    "hidden_size": 16,
    "moe_intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(Qwen3MoeConfig(**SIZES)).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_stacked_experts_are_sent_as_save_pretrained_writes_them(folder, tmp_path, dtype):
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert "model.layers.1.mlp.experts.gate_up_proj" in model.state_dict(), "Transformers stacks the experts"
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    export = FullWeights(str(folder), dtype)
    model.save_pretrained(tmp_path / "saved")
    for _ in range(2):
        sent = dict(export(Policy(model, None).weights()))
        saved = load_file(tmp_path / "saved" / "model.safetensors")
        assert sent.keys() == saved.keys() and "model.layers.1.mlp.experts.3.up_proj.weight" in sent
        for name, value in saved.items():
            assert sent[name].is_contiguous() and torch.equal(sent[name], value.to(getattr(torch, dtype))), name


def test_experts_of_another_size_are_an_error(folder):
    other = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**SIZES | {"num_experts": 3}))
    with pytest.raises(UserError, match=r"experts\.3\.down_proj\.weight is only in the files"):
        FullWeights(str(folder), "float32")(Policy(other, None).weights())
