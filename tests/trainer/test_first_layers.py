"""The checks of attention run the first layers of a model whose weights stay in files."""

import pytest
import torch
from omegaconf import OmegaConf
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from mtrl.command.compose import compose
from mtrl.distributed.sharding import decoder_layers
from mtrl.errors import UserError
from mtrl.models.attention import OWN
from mtrl.models.tiny import save
from mtrl.models.weight_files import file_tensors
from mtrl.trainer.first_layers import first_layers, kinds_of
from mtrl.trainer.loading import fit_to_ranks, load_model

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.3}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}


def config_of(folder, *words):
    return OmegaConf.to_object(compose(["model=hf", f"model.path={folder}", "model.device=cpu", *words]))


def in_files(model, tokenizer, folder, *words):
    save(model, tokenizer, folder)
    config = config_of(folder, *words)
    model, _ = load_model(config, str(folder), in_files=True)
    assert file_tensors(model)
    return config, model


@pytest.mark.parametrize(("tied", "implementation"), [(False, "sdpa"), (True, "eager")], ids=["untied", "tied"])
def test_equal_layers_are_represented_by_one(tied, implementation, tiny_tokenizer, tmp_path):
    vocabulary = {"vocab_size": len(tiny_tokenizer), "tie_word_embeddings": tied}
    whole = Qwen3ForCausalLM(Qwen3Config(**SIZES, **HEADS, **vocabulary)).eval()
    _, model = in_files(whole, tiny_tokenizer, tmp_path / "model", f"model.attn_implementation={implementation}")
    small = first_layers(model)
    assert len(decoder_layers(small)) == 1 and len(decoder_layers(model)) == 4
    assert not file_tensors(whole) and all(p.is_meta for p in model.parameters())
    whole.set_attn_implementation(implementation)
    ids = torch.arange(12)[None]
    del whole.model.layers[1:]
    with torch.no_grad():
        expected, found = (m(input_ids=ids, use_cache=False).logits for m in (whole, small))
    assert torch.equal(expected, found)


def test_every_kind_of_layer_is_there(tiny_tokenizer, tmp_path):
    sliding = GptOssForCausalLM(GptOssConfig(**SIZES, **HEADS, **EXPERTS, vocab_size=len(tiny_tokenizer)))
    words = ["model.attn_implementation=eager"]
    assert len(decoder_layers(first_layers(in_files(sliding, tiny_tokenizer, tmp_path / "sliding", *words)[1]))) == 2


@pytest.mark.parametrize("dense", [1, 3])
def test_dense_layers_before_experts_are_another_kind(dense):
    sizes = SIZES | {
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": 97,
        "first_k_dense_replace": dense,
    }
    ranks = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
    experts = {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 24,
    }
    with torch.device("meta"):
        kinds = kinds_of(DeepseekV3ForCausalLM(DeepseekV3Config(**sizes, **ranks, **experts)))
    assert [kind == kinds[0] for kind in kinds] == [number < dense for number in range(4)]
    assert kinds[-1] == kinds[dense]


def test_recomputed_layers_are_no_other_kind(tiny_tokenizer, tmp_path):
    from mtrl.trainer.loading import recompute

    whole = Qwen3ForCausalLM(Qwen3Config(**SIZES, **HEADS, vocab_size=len(tiny_tokenizer)))
    words = ["trainer.gradient_checkpointing=true", "trainer.recomputed_layers=2"]
    config, model = in_files(whole, tiny_tokenizer, tmp_path / "model", *words)
    recompute(model, config)
    assert len(set(kinds_of(model))) == 1


@pytest.mark.parametrize("packing", ["true", "null", "false"])
@pytest.mark.parametrize("parts", [1, 2])
def test_the_attention_is_that_of_whole_weights(packing, parts, tiny_tokenizer, tmp_path):
    made = Qwen3ForCausalLM(Qwen3Config(**SIZES, **HEADS, vocab_size=len(tiny_tokenizer)))
    config, model = in_files(made, tiny_tokenizer, tmp_path / "model", f"trainer.packing={packing}")
    config.trainer.sequence_parallel = parts
    whole, _ = load_model(config, str(tmp_path / "model"))
    for module in (model, whole):
        fit_to_ranks(module, config)
    assert model.config._attn_implementation == whole.config._attn_implementation
    assert (whole.config._attn_implementation == OWN) == (packing != "false" or parts > 1)


def test_a_model_that_mixes_samples_is_refused(tiny_tokenizer, tmp_path):
    made = MambaForCausalLM(
        MambaConfig(hidden_size=32, num_hidden_layers=2, state_size=4, vocab_size=len(tiny_tokenizer))
    )
    words = ["model.attn_implementation=eager", "trainer.packing=true"]
    config, model = in_files(made, tiny_tokenizer, tmp_path / "model", *words)
    with pytest.raises(
        UserError, match=r"trainer\.packing=true lays samples end to end, and MambaForCausalLM does not"
    ):
        fit_to_ranks(model, config)
