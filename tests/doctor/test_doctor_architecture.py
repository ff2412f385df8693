"""Sizes of models, compared with the modules of Transformers and with published sizes."""

import json
from dataclasses import replace

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from mtrl.config.model_schema import ModelConfig
from mtrl.doctor.architecture import Architecture, find, table
from mtrl.errors import UserError
from mtrl.models.lora import add_adapters


def on_meta(fields):
    """Return the real module with these fields, without memory."""
    own = {name: value for name, value in fields.items() if name not in ("model_type", "parameters")}
    config = CONFIG_MAPPING[fields["model_type"]](**own)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, attn_implementation="eager")


@pytest.mark.parametrize("name", table())
def test_parameters_are_those_of_the_module_and_of_the_model_card(name):
    model, size = on_meta(table()[name]), find(name)
    assert size.parameters == sum(p.numel() for p in model.parameters()) == table()[name]["parameters"]
    layer = model.model.layers[0]
    assert size.layer == sum(p.numel() for p in layer.parameters())
    assert size.head == model.get_output_embeddings().weight.numel()
    assert size.largest == max(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", ["Qwen/Qwen3-0.6B", "lmsys/gpt-oss-20b-bf16"])
@pytest.mark.parametrize("targets", [[], ["q_proj", "v_proj"]])
def test_adapters_are_those_of_peft(name, targets):
    fields = table()[name] | {"num_hidden_layers": 2}
    with torch.device("meta"):
        adapted = add_adapters(on_meta(fields), ModelConfig(lora_rank=8, lora_target_modules=targets))
    expected = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    assert Architecture.of(fields, name).adapters(8, tuple(targets)) == expected


def test_a_folder_is_read(tmp_path):
    on_meta(table()["Qwen/Qwen3-0.6B"]).config.save_pretrained(tmp_path)
    assert find(str(tmp_path)) == find("Qwen/Qwen3-0.6B")


def test_fields_that_config_json_may_leave_out():
    fields = dict(table()["meta-llama/Llama-3.2-1B-Instruct"])
    del fields["head_dim"], fields["num_key_value_heads"]
    whole = Architecture.of(fields, "x")
    assert whole == replace(find("meta-llama/Llama-3.2-1B-Instruct"), num_key_value_heads=32)


@pytest.mark.parametrize("name", ["Qwen/Qwen3-0.6B", "meta-llama/Llama-3.2-1B-Instruct", "Qwen/Qwen3-30B-A3B"])
def test_biases_of_attention_are_counted(name):
    fields = table()[name] | {"num_hidden_layers": 2, "attention_bias": True}
    assert Architecture.of(fields, "x").parameters == sum(p.numel() for p in on_meta(fields).parameters())


def test_a_folder_may_be_in_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(LLAMA))
    assert find("~/model") == find(str(tmp_path / "model"))


LLAMA = table()["meta-llama/Llama-3.2-1B-Instruct"]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "has a config.json that cannot be read"),
        (json.dumps({"model_type": "mamba"}), "has the model_type mamba, .* known are llama, qwen2, qwen3, gpt_oss"),
        (json.dumps({"model_type": "llama", "hidden_size": 8, "num_attention_heads": 2}), "has no intermediate_size"),
        ("[]", "has a config.json that is no mapping"),
        *((json.dumps(LLAMA | {"num_attention_heads": heads}), "which is no size") for heads in (0, "8", True, 2.0)),
        (json.dumps(LLAMA | {"num_hidden_layers": -3}), "num_hidden_layers=-3, which is no size"),
    ],
)
def test_unknown_architectures_are_refused(tmp_path, text, sentence):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=sentence):
        find(str(tmp_path))


def test_a_name_that_is_not_in_the_table():
    with pytest.raises(UserError, match="model.path=owner/name is neither a folder .* download it and name its folder"):
        find("owner/name")
