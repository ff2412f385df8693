"""Ranks other than the leader load no weights: they receive their slices, and their memory stays small."""

import re
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from shard_ranks import on_ranks
from transformers import Qwen3Config, Qwen3ForCausalLM

from mtrl.command.compose import compose
from mtrl.distributed.sharding import full_state
from mtrl.engines.server.checksum import checksum
from mtrl.models.tiny import save
from mtrl.trainer.loading import load_model
from mtrl.trainer.setup.models import make_learner

SIZES = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 12, "head_dim": 64}


def peak_memory():
    """Return the largest resident memory of this process so far, in bytes."""
    return 1024 * int(re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())[1])


def broadcast(value):
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def load(config, path):
    """Load the policy; return the growth of the peak of memory, and on rank 0 the checksum of the weights."""
    rank = dist.get_rank()
    world = SimpleNamespace(rank=rank, size=2, is_leader=rank == 0, broadcast=broadcast, background_group=None)
    dist.barrier()
    before = peak_memory()
    learner = make_learner(config, world, path)
    grown = peak_memory() - before
    state = full_state(learner.policy.model)
    return grown, None if state is None else checksum(state)


def test_only_the_leader_holds_whole_weights(tmp_path, tiny_tokenizer):
    torch.manual_seed(0)
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": len(tiny_tokenizer)}
    model = Qwen3ForCausalLM(Qwen3Config(**SIZES, **heads))
    size = sum(parameter.nbytes for parameter in model.parameters())
    expected = checksum(full_state(model))
    folder = tmp_path / "model"
    save(model, tiny_tokenizer, folder)
    del model
    config = OmegaConf.to_object(compose(["model=hf", f"model.path={folder}", "model.device=cpu"]))
    (leader, state), (follower, nothing) = on_ranks(2, tmp_path, load, config, str(folder))
    assert state == expected and nothing is None
    assert follower < 0.8 * size < leader, (follower / size, leader / size)


def test_a_module_without_weights_has_the_structure_of_the_model(make_tiny_model, tiny_tokenizer, tmp_path):
    save(make_tiny_model(), tiny_tokenizer, tmp_path)
    config = OmegaConf.to_object(compose(["model=hf", f"model.path={tmp_path}", "model.dtype=bfloat16"]))
    whole, structure = (load_model(config, str(tmp_path), device=device)[0] for device in ("cpu", "meta"))
    assert all(value.is_meta for value in structure.state_dict().values())
    for mine, other in ((whole, structure), (structure, whole)):
        described = [{n: (p.shape, p.dtype) for n, p in m.named_parameters()} for m in (mine, other)]
        assert described[0] == described[1], "tied parameters count once in both"
    assert not structure.training
