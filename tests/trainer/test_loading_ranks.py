"""Ranks read their slices from files, or receive them from the leader: both ways give the same weights, and no rank but
a leader that sends slices holds whole weights."""

import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from mtrl.command.compose import compose
from mtrl.distributed.sharding import local_part
from mtrl.errors import UserError
from mtrl.models.tiny import save
from mtrl.models.weight_files import SINGLE, file_tensors
from mtrl.trainer.loading import load_model
from mtrl.trainer.setup.models import make_learner
from tests.distributed.ranks import run_ranks
from tests.divided_models import not_divided

LARGE = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 6, "head_dim": 64}
SMALL = {"hidden_size": 32, "intermediate_size": 45, "num_hidden_layers": 2, "head_dim": 2}
"""With a head dimension of 2, some of four ranks have an empty slice of the norms of queries and keys; the intermediate
size does not divide equally."""

KL = ["algorithm.kl_loss_coef=0.1"]
CRITIC = ["algorithm.advantage_method=gae"]
PEERS = ["algorithm.kl_reference=tied", "algorithm.critic.path=tied"]
LORA = ["model.lora_rank=2", "seed=5"]
HALF = ["model.dtype=bfloat16", "trainer.fsdp.param_dtype=bfloat16"]
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
"""Six experts are not divided equally among four ranks."""
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4}
ROUTED = {"n_routed_experts": 6, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4}
OFFLOAD = ["trainer.fsdp.cpu_offload=true"]
KINDS = {"files": False, "tied": True, "head": True, "experts": False, "routed": False}
"""Names of the models, and whether their embedding is also the head."""
CASES = {
    2: [
        ("files", 1, 1, [*KL, *CRITIC]),
        ("files", 1, 1, [*LORA, *HALF]),
        ("files", 1, 1, [*PEERS, *KL, *CRITIC]),
        ("files", 1, 1, ["distillation.weight=1", "distillation.teacher.path=tied"]),
        ("tied", 1, 1, [*OFFLOAD, *LORA]),
        ("head", 1, 1, []),
        ("tied", 2, 1, OFFLOAD),
        ("experts", 1, 1, HALF),
        ("experts", 2, 1, KL, 2),
        ("routed", 1, 1, HALF),
    ],
    4: [
        ("tied", 1, 1, []),
        ("files", 1, 2, CRITIC),
        ("files", 2, 1, KL),
        ("tied", 2, 2, []),
        ("experts", 1, 1, []),
        ("experts", 1, 1, [], 2),
        ("experts", 2, 1, [], 2),
    ],
}
"""Models, numbers of ranks that divide matrices, replicas, settings, and numbers of ranks that divide experts if more
than one does, by number of ranks."""


def peak_memory():
    """Return the largest resident memory of this process so far, in bytes."""
    return 1024 * int(re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())[1])


def broadcast(value):
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def world_of(rank):
    names = {"rank": rank, "size": dist.get_world_size(), "is_leader": rank == 0}
    return SimpleNamespace(**names, broadcast=broadcast, background_group=dist.group.WORLD)


def config_of(path, words=(), tensor=1, replicas=1, expert=1):
    config = OmegaConf.to_object(compose(["model=hf", f"model.path={path}", "model.device=cpu", *words]))
    config.trainer.tensor_parallel, config.trainer.fsdp.replicas = tensor, replicas
    config.trainer.expert_parallel = expert
    return config


def write_both_ways(model, tokenizer, folder, shard_size="5GB"):
    """Write a model as safetensors files to `folder`, and in PyTorch's format, which only the leader can load, to
    `folder`-whole."""
    save(model, tokenizer, folder)
    whole = folder.with_name(f"{folder.name}-whole")
    shutil.copytree(folder, whole, ignore=shutil.ignore_patterns(SINGLE))
    torch.save(model.state_dict(), whole / "pytorch_model.bin")
    if shard_size != "5GB":
        (folder / SINGLE).unlink()
        model.save_pretrained(folder, max_shard_size=shard_size)
        assert len(list(folder.glob("model-*-of-*.safetensors"))) > 2


@pytest.fixture(scope="module")
def folders(tmp_path_factory, tiny_tokenizer):
    """Return the folder of small models: several files in bfloat16, tied weights, tied weights of which the file has
    the second name only, and two mixtures whose experts are tensors of their own in several files, one of which has
    buffers in its files as well."""
    place = tmp_path_factory.mktemp("models")
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3}
    for number, (name, tied) in enumerate(KINDS.items()):
        torch.manual_seed(number)
        sizes = {**SMALL, **heads, "vocab_size": len(tiny_tokenizer), "tie_word_embeddings": tied}
        if name == "experts":
            model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **EXPERTS))
        elif name == "routed":
            model = DeepseekV3ForCausalLM(DeepseekV3Config(**{**sizes, **EXPERTS, **LATENT, **ROUTED}))
            model.model.layers[1].mlp.gate.e_score_correction_bias.normal_()
        else:
            model = Qwen3ForCausalLM(Qwen3Config(**sizes))
        with torch.no_grad():
            for parameter in model.parameters():  # norms have values as well
                parameter.add_(0.1 * torch.randn(parameter.shape))
        size = "10KB" if name in ("files", "experts", "routed") else "5GB"
        write_both_ways(model.bfloat16(), tiny_tokenizer, place / name, size)
    rename_embedding(place / "head")
    return place


def rename_embedding(folder):
    from safetensors.torch import load_file, save_file

    state = load_file(folder / SINGLE)
    state["lm_head.weight"] = state.pop("model.embed_tokens.weight")
    save_file(state, folder / SINGLE, metadata={"format": "pt"})


def parts_of(learner):
    """Return this rank's parts of all models of a learner, with their dtypes and placements."""
    teacher = learner.teacher and learner.teacher.model
    reference = getattr(learner.reference, "model", None)
    modules = {"policy": learner.policy.model, "reference": reference, "teacher": teacher}
    modules["critic"] = learner.critic and learner.critic.model
    return {
        (role, name): (
            local_part(value.detach()),
            value.dtype,
            str(getattr(value, "placements", "")),
            value.requires_grad,
        )
        for role, module in modules.items()
        if module is not None
        for name, value in [*module.named_parameters(), *module.named_buffers()]
    }


def differences(first, second):
    """Return what differs between the parts of two learners, by role and name."""
    assert first.keys() == second.keys()
    pairs = {key: (value, second[key]) for key, value in first.items()}
    found = {key: [(*one[1:], one[0].shape), (*other[1:], other[0].shape)] for key, (one, other) in pairs.items()}
    return {
        key: found[key]
        for key, (one, other) in pairs.items()
        if found[key][0] != found[key][1] or not torch.equal(one[0], other[0])
    }


def both_ways(rank, place):
    """Return for each case what differs between the two ways, the models, the number of tensors and the number of empty
    parts, and the attention implementations."""
    os.chdir(place)  # paths of peers are relative to the folder
    found = []
    for name, tensor, replicas, words, *expert in CASES[dist.get_world_size()]:
        if max(tensor, *expert, 1) > 1 and not_divided():
            continue
        whole = [re.sub(r"=tied$", "=tied-whole", word) for word in words]
        learners = [
            make_learner(config_of(path, chosen, tensor, replicas, *expert), world_of(rank), path)
            for path, chosen in ((name, words), (f"{name}-whole", whole))
        ]
        mine, theirs = (parts_of(learner) for learner in learners)
        empty = sum(value.numel() == 0 for value, *_ in mine.values())
        kinds = {learner.policy.model.config._attn_implementation for learner in learners}
        found.append((differences(mine, theirs), {role for role, _ in mine}, len(mine), empty, kinds))
    return found


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.ci)])
def test_slices_from_files_are_those_of_whole_weights(size, folders, tmp_path):
    for name in KINDS:
        model, _ = load_model(config_of(folders / name), str(folders / name), in_files=True)
        assert len(file_tensors(model)) == len(list(model.parameters()))
        whole, _ = load_model(config_of(folders / name), str(folders / f"{name}-whole"), in_files=True)
        assert not file_tensors(whole)
    results = run_ranks(size, both_ways, tmp_path, folders)
    for rank in results:
        for changed, _, count, _, kinds in rank:
            assert changed == {} and count > 20 and len(kinds) == 1
    roles = set().union(*(roles for _, roles, *_ in results[0]))
    assert roles == ({"policy", "reference", "critic", "teacher"} if size == 2 else {"policy", "reference", "critic"})
    assert any(empty for rank in results for *_, empty, _ in rank)


def peaks(rank, small, folder):
    """Return the growth of this process's peak of memory while it loads the model, in bytes: of slices from files, and
    of whole weights by rank 0. A small model is loaded first, by which all modules are imported."""
    make_learner(config_of(small), world_of(rank), str(small))
    found = []
    for path in (folder, folder.with_name(f"{folder.name}-whole")):
        Path("/proc/self/clear_refs").write_text("5")  # the peak is now the current size
        dist.barrier()
        before = peak_memory()
        learner = make_learner(config_of(path), world_of(rank), str(path))
        found.append(peak_memory() - before)
        del learner
    return found


def test_no_rank_holds_whole_weights(tmp_path, tiny_tokenizer, folders):
    torch.manual_seed(0)
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": len(tiny_tokenizer)}
    model = Qwen3ForCausalLM(Qwen3Config(**LARGE, **heads))
    size = sum(parameter.nbytes for parameter in model.parameters())
    write_both_ways(model, tiny_tokenizer, tmp_path / "model")
    del model
    (leader, whole), (follower, received) = run_ranks(2, peaks, tmp_path, folders / "files", tmp_path / "model")
    assert max(leader, follower) < 0.75 * size < whole
    assert received < 0.75 * size


def test_a_module_without_weights_has_the_structure_of_the_model(make_tiny_model, tiny_tokenizer, tmp_path):
    save(make_tiny_model(), tiny_tokenizer, tmp_path)
    config = OmegaConf.to_object(compose(["model=hf", f"model.path={tmp_path}", "model.dtype=bfloat16"]))
    whole, structure = (load_model(config, str(tmp_path), device=device)[0] for device in ("cpu", "meta"))
    assert all(value.is_meta for value in structure.state_dict().values())
    for mine, other in ((whole, structure), (structure, whole)):
        described = [{n: (p.shape, p.dtype) for n, p in m.named_parameters()} for m in (mine, other)]
        assert described[0] == described[1], "tied parameters count once in both"
    assert not structure.training


def test_a_truncated_file_is_reported_at_once(make_tiny_model, tiny_tokenizer, tmp_path):
    save(make_tiny_model(), tiny_tokenizer, tmp_path)
    file = tmp_path / SINGLE
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(UserError, match=r"model\.path=.* cannot be loaded \(.*\); give a folder or a Hub name"):
        load_model(config_of(tmp_path), str(tmp_path), in_files=True)
