"""Models whose weights stay in files are those of `from_pretrained`; all others are refused."""

import json
import shutil

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from mtrl.distributed.ties import aliases_of
from mtrl.errors import UserError
from mtrl.models.stored_tensors import FileTensor, JoinedTensor
from mtrl.models.weight_files import INDEX, SINGLE, digests, file_tensors, model_in_files

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 97}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2}
ROPE = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPE |= {"original_max_position_embeddings": 128}
PLAIN = {
    "Qwen2": SIZES,
    "Qwen3": {**SIZES, "head_dim": 8},
    "tied": {**SIZES, "head_dim": 8, "tie_word_embeddings": True},
    "Llama": {**SIZES, "rope_parameters": ROPE},
    "Phi3": {**SIZES, "pad_token_id": 0},
    "Gemma3": {**SIZES, "head_dim": 8},
    "GptOss": {**SIZES, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 97},
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8}
STACKED = {
    "Qwen3Moe": SIZES | EXPERTS | {"num_experts": 4},
    "Qwen2Moe": SIZES | EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 40, "decoder_sparse_step": 2},
    "Mixtral": SIZES | EXPERTS | {"num_local_experts": 12},
    "Olmoe": SIZES | EXPERTS | {"num_experts": 4},
    "Jamba": SIZES | EXPERTS | {"num_experts": 4, "use_mamba_kernels": False},
}
"""Mixtures whose files have a tensor for each matrix of each expert. One has more experts than there are digits."""
ROUTED = {"moe_intermediate_size": 24, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
ROUTED |= {"first_k_dense_replace": 1}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
WITH_BUFFERS = {
    "DeepseekV3": SIZES | ROUTED | LATENT | {"num_key_value_heads": 4},
    "Glm4Moe": SIZES | ROUTED | {"head_dim": 8},
}
"""Mixtures whose files hold buffers as well: the biases of the routers, which stay in float32."""
CONFIGS = {"tied": "Qwen3Config", "Gemma3": "Gemma3TextConfig"}
MODELS = {"tied": "Qwen3ForCausalLM", "GPT2": "GPT2LMHeadModel"}


def make(kind, sizes, folder, **saved):
    """Write a model with random weights in bfloat16, and settings of generation. Experts are tensors of their own."""
    torch.manual_seed(0)
    config = getattr(transformers, CONFIGS.get(kind, f"{kind}Config"))(**sizes)
    model = getattr(transformers, MODELS.get(kind, f"{kind}ForCausalLM"))(config).bfloat16()
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_()
    model.generation_config = GenerationConfig(temperature=0.7, do_sample=True)
    model.save_pretrained(folder, **saved)


def structure_of(folder, dtype=torch.float32):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=dtype)


def opened(folder, dtype=torch.float32):
    return model_in_files(structure_of(folder, dtype), str(folder), dtype)


@pytest.fixture
def folder(tmp_path):
    make("Qwen3", PLAIN["Qwen3"], tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", [*PLAIN, *STACKED, *WITH_BUFFERS])
def test_a_load_in_files_is_that_of_from_pretrained(kind, dtype, tmp_path):
    make(kind, (PLAIN | STACKED | WITH_BUFFERS)[kind], tmp_path, max_shard_size="10KB")
    assert (tmp_path / INDEX).exists()
    whole, model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype), opened(tmp_path, dtype)
    stored, parameters = file_tensors(model), dict(whole.named_parameters())
    assert stored.keys() == parameters.keys() == dict(model.named_parameters()).keys()
    for name, empty in model.named_parameters():
        assert empty.is_meta and (empty.dtype, empty.shape) == (parameters[name].dtype, parameters[name].shape)
        read = stored[name].read()
        assert read.dtype == torch.bfloat16 and torch.equal(read.to(empty.dtype), parameters[name])
        assert torch.equal(stored[name].read([slice(1, 3)]), read[1:3])
    buffers = dict(model.named_buffers())
    assert buffers.keys() == dict(whole.named_buffers()).keys()
    for name, value in whole.named_buffers():
        assert buffers[name].dtype == value.dtype and torch.equal(buffers[name], value)
    assert aliases_of(model) == aliases_of(whole)
    assert model.generation_config == whole.generation_config and model.name_or_path == whole.name_or_path
    assert model.config.to_dict() == whole.config.to_dict() and not model.training
    assert vars(model).keys() == vars(whole).keys()
    joined = {name for name, place in stored.items() if isinstance(place, JoinedTensor)}
    assert joined == {name for name in stored if kind not in PLAIN and ".experts." in name}
    biases = {name: value for name, value in buffers.items() if name.endswith("e_score_correction_bias")}
    assert bool(biases) == (kind in WITH_BUFFERS) and all(value.abs().sum() for value in biases.values())
    files = [{piece.file for piece, _ in stored[name].pieces} for name in joined]
    assert any(len(found) > 1 for found in files) == bool(joined), "experts of a layer are in several files"


def test_experts_that_are_stacked_already_are_plain(tmp_path):
    make("Qwen3Moe", STACKED["Qwen3Moe"], tmp_path, save_original_format=False)
    assert {type(place) for place in file_tensors(opened(tmp_path)).values()} == {FileTensor}


def test_a_file_with_the_second_name_of_tied_weights_is_read(tmp_path):
    make("tied", PLAIN["tied"], tmp_path)
    changed(tmp_path, lambda state: state.update({"lm_head.weight": state.pop("model.embed_tokens.weight")}))
    stored = file_tensors(opened(tmp_path))
    assert stored["model.embed_tokens.weight"].name == "lm_head.weight" and "lm_head.weight" not in stored


def test_a_body_is_read_as_transformers_reads_it(folder):
    """Names without the prefix of the body become those of the causal LM."""
    changed(folder, lambda state: [state.update({n.removeprefix("model."): state.pop(n)}) for n in list(state)])
    stored = file_tensors(opened(folder))
    assert stored["model.norm.weight"].name == "norm.weight" and stored["lm_head.weight"].name == "lm_head.weight"


def test_copies_and_adapters_keep_the_places_of_weights(folder):
    import copy

    from mtrl.config.model_schema import ModelConfig
    from mtrl.models.lora import add_adapters, plain_name
    from mtrl.models.value_head import ValueModel

    model = opened(folder)
    stored = file_tensors(model)
    assert file_tensors(copy.deepcopy(model)) == stored
    body = file_tensors(ValueModel(copy.deepcopy(model)))
    assert body == {
        name.replace("model.", "body.", 1): place for name, place in stored.items() if "lm_head" not in name
    }
    settings = ModelConfig(lora_rank=2)
    adapted = add_adapters(model, settings, seed=3)
    assert {plain_name(name): place for name, place in file_tensors(adapted).items()} == stored
    whole = add_adapters(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), settings, seed=3)
    for (name, mine), (_, theirs) in zip(adapted.named_parameters(), whole.named_parameters(), strict=True):
        assert mine.requires_grad == theirs.requires_grad == ("lora_" in name) == (not mine.is_meta)
        assert mine.is_meta or torch.equal(mine, theirs)


def changed(folder, change):
    """Change the state in the only file of a folder."""
    state = load_file(folder / SINGLE)
    change(state)
    save_file(state, folder / SINGLE, metadata={"format": "pt"})


def configured(folder, **settings):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


def as_bin(folder):
    torch.save(load_file(folder / SINGLE), folder / "pytorch_model.bin")
    (folder / SINGLE).unlink()


def cut(folder):
    file = folder / SINGLE
    file.write_bytes(file.read_bytes()[:-1000])


def outside(folder):
    """Move the file out of the folder, to which the index refers."""
    shutil.move(folder / SINGLE, folder.parent / SINGLE)
    with safe_open(folder.parent / SINGLE, "pt") as file:
        names = dict.fromkeys(file.keys(), f"../{SINGLE}")
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}))


NORM = "model.norm.weight"
REFUSED = {
    "a missing tensor": lambda folder: changed(folder, lambda state: state.pop(NORM)),
    "an unexpected tensor": lambda folder: changed(folder, lambda state: state.update(other=torch.ones(3))),
    "another shape": lambda folder: changed(folder, lambda state: state.update({NORM: torch.ones(3)})),
    "whole numbers": lambda folder: changed(folder, lambda state: state.update({NORM: torch.ones(32).to(torch.int8)})),
    "quantised": lambda folder: configured(folder, quantization_config={"quant_method": "fp8"}),
    "another file by the configuration": lambda folder: configured(folder, transformers_weights=SINGLE),
    "an adapter": lambda folder: (folder / "adapter_config.json").write_text("{}"),
    "a checkpoint of torch.distributed": lambda folder: (folder / ".metadata").write_text(""),
    "PyTorch's format": as_bin,
    "a truncated file": cut,
    "no file": lambda folder: (folder / SINGLE).unlink(),
    "an invalid index": lambda folder: [(folder / SINGLE).unlink(), (folder / INDEX).write_text("[]")],
    "a file outside of the folder": outside,
    "no folder": shutil.rmtree,
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_files_are_left_to_from_pretrained(case, folder, monkeypatch):
    monkeypatch.setattr("mtrl.utils.hub.hub_answers", lambda: False)
    structure = structure_of(folder)
    REFUSED[case](folder)
    if case == "quantised":
        structure.config = AutoConfig.from_pretrained(folder)
    if case.startswith("another file by"):
        structure.config.transformers_weights = SINGLE
    assert model_in_files(structure, str(folder), torch.float32) is None


def test_tensors_that_transformers_splits_are_left_to_it(tmp_path):
    make("HrmText", SIZES | {"head_dim": 8}, tmp_path)
    assert opened(tmp_path) is None


@pytest.mark.parametrize("operation", ["Transpose", "Interleave"])
def test_experts_that_transformers_changes_otherwise_are_left_to_it(operation, tmp_path, monkeypatch):
    """Stand-ins would look the same, since the width of the experts is that of the model."""
    from transformers import conversion_mapping, core_model_loading

    make("Qwen3Moe", STACKED["Qwen3Moe"] | {"moe_intermediate_size": 32}, tmp_path)
    assert opened(tmp_path) is not None
    rules = conversion_mapping.get_checkpoint_conversion_mapping("qwen3_moe")
    rules[-1].operations.append(getattr(core_model_loading, operation)(1, 2))
    monkeypatch.setitem(conversion_mapping._checkpoint_conversion_mapping_cache, "qwen3_moe", rules)
    assert opened(tmp_path) is None


EXPERT = "model.layers.1.mlp.experts.2.up_proj.weight"
WRONG = {
    "missing": lambda state: state.pop(EXPERT),
    "of another shape": lambda state: state.update({EXPERT: torch.ones(24, 31)}),
    "wider": lambda state: state.update({EXPERT: torch.ones(25, 32)}),
    "one too many": lambda state: state.update({EXPERT.replace("2.up", "4.up"): state[EXPERT].clone()}),
    "of whole numbers": lambda state: state.update({EXPERT: torch.ones(24, 32, dtype=torch.int8)}),
}


@pytest.mark.parametrize("case", WRONG)
def test_experts_that_do_not_fit_are_left_to_from_pretrained(case, tmp_path):
    make("Qwen3Moe", STACKED["Qwen3Moe"], tmp_path)
    changed(tmp_path, WRONG[case])
    assert opened(tmp_path) is None


def test_a_digest_covers_every_file_of_a_stacked_parameter(tmp_path):
    make("Qwen3Moe", STACKED["Qwen3Moe"], tmp_path, max_shard_size="20KB")
    stored = file_tensors(opened(tmp_path))
    found = digests(place for place in stored.values() if isinstance(place, JoinedTensor))
    assert len(found) > 1 and all(found.values()) and found.items() <= digests(stored.values()).items()


def test_two_different_tensors_of_tied_weights_are_left_to_transformers(tmp_path):
    make("tied", PLAIN["tied"], tmp_path)
    changed(tmp_path, lambda state: state.update({"lm_head.weight": torch.ones(97, 32, dtype=torch.bfloat16)}))
    assert opened(tmp_path) is None


def test_code_of_a_model_itself_is_left_to_it(folder):
    structure = structure_of(folder)
    structure.__class__ = type("Own", (type(structure),), {"__module__": "transformers_modules.model"})
    assert model_in_files(structure, str(folder), torch.float32) is None


def test_a_name_of_the_hub_is_read_from_its_copy(folder, tmp_path, monkeypatch):
    """The copy has the layout of huggingface_hub's cache, and the Hub does not answer."""
    from huggingface_hub import constants

    revision, place = "0" * 40, tmp_path / "hub" / "models--some--model"
    monkeypatch.setattr("mtrl.utils.hub.hub_answers", lambda: False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    structure = structure_of(folder)
    assert model_in_files(structure, "some/model", torch.float32) is None
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text(revision)
    shutil.copytree(folder, place / "snapshots" / revision)
    stored = file_tensors(model_in_files(structure, "some/model", torch.float32))
    assert {tensor.file for tensor in stored.values()} == {str(place / "snapshots" / revision / SINGLE)}


def test_a_digest_notices_other_files(folder, tmp_path):
    copied = tmp_path / "copy"
    shutil.copytree(folder, copied)
    (place,) = {tensor.file for tensor in file_tensors(opened(folder)).values()}
    other = FileTensor(str(copied / SINGLE), NORM, (32,))

    def same():
        return [*digests([other]).values()] == [*digests([FileTensor(place, NORM, (32,))]).values()]

    assert same()
    changed(copied, lambda state: state[NORM].mul_(1.5))
    assert not same()
    (copied / SINGLE).unlink()
    assert [*digests([other]).values()] == [""]


def test_a_digest_notices_a_change_of_the_last_number_of_a_tensor(tmp_path):
    files = [tmp_path / f"{i}.safetensors" for i in range(2)]
    for file, last in zip(files, (0.0, 1.0), strict=True):
        save_file({"a": torch.cat([torch.zeros(9999), torch.tensor([last])])}, file)
    assert len({*digests([FileTensor(str(file), "a", (10000,)) for file in files]).values()}) == 2


@pytest.mark.parametrize(
    "content",
    [b"version https://git-lfs.github.com/spec/v1\n", b"\xff" * 64, b"", b"\x02" + bytes(7) + b"[]",
     b"\x08" + bytes(7) + b'{"a":{}}'],
)  # fmt: skip
def test_another_kind_of_file_has_no_digest(content, tmp_path):
    file = tmp_path / SINGLE
    file.write_bytes(content)
    assert digests([FileTensor(str(file), "a", (1,))]) == {str(file): ""}


DAMAGES = {
    "truncated": cut,
    "removed": lambda folder: (folder / SINGLE).unlink(),
    "replaced": lambda folder: changed(folder, lambda state: state.update({NORM: torch.ones(1)})),
    "without the tensor": lambda folder: changed(folder, lambda state: state.pop(NORM)),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_file_that_changes_before_it_is_read_is_an_error(damage, folder):
    stored = file_tensors(opened(folder))[NORM]
    DAMAGES[damage](folder)
    with pytest.raises(UserError, match=rf"{NORM} cannot be read from .*{SINGLE} \(.*\); each rank reads its slices"):
        stored.read([slice(0, 2)])
