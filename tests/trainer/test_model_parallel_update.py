"""Updates by ranks that divide matrices or experts: gradients, log-probs, weights and checkpoints are those of one
process."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from test_loading_ranks import broadcast
from test_sequence_parallel_update import Together, assert_close, config_of, learned, samples_of
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from mtrl.algorithms.reductions import token_weights
from mtrl.distributed.rank_group import RankGroup
from mtrl.distributed.sharding import full_state, whole_tensor
from mtrl.distributed.world import World
from mtrl.models.tiny import save
from mtrl.trainer.data.batching import micro_batches
from mtrl.trainer.setup.models import make_learner
from mtrl.trainer.update.learner import Learners
from tests.distributed.ranks import run_ranks

pytestmark = pytest.mark.skipif(
    not hasattr(PreTrainedModel, "_resolve_parallel_plans"), reason="needs Transformers 5.23 or later"
)

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8, "vocab_size": 339}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3}
"""The vocabulary does not divide equally."""
EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 4}
MODELS = {
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES)),
    "tied": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=True)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **EXPERTS, moe_intermediate_size=24)),
    "gpt_oss": lambda: GptOssForCausalLM(GptOssConfig(**SIZES, **EXPERTS)),
}
CHUNKED = "trainer.max_logits_per_chunk=2000"
TERMS = ["algorithm.kl_loss_coef=0.3", "algorithm.kl_estimator=k1", "algorithm.entropy_coef=0.2"]
CASES = {
    2: [
        ("qwen3", 2, 1, 1, TERMS),
        ("qwen3", 2, 1, 1, ["trainer.packing=false", "trainer.gradient_checkpointing=true"]),
        ("qwen3", 2, 1, 1, ["trainer.fsdp.cpu_offload=true"]),
        ("tied", 2, 1, 1, [CHUNKED]),
        ("llama", 2, 1, 1, [CHUNKED]),
        ("qwen3_moe", 1, 2, 1, TERMS),
        ("qwen3_moe", 2, 2, 1, ["trainer.gradient_checkpointing=true"]),
        ("gpt_oss", 1, 2, 1, [CHUNKED]),
    ],
    4: [
        ("qwen3", 2, 1, 1, TERMS),
        ("tied", 2, 1, 2, [CHUNKED]),
        ("qwen3_moe", 1, 2, 1, []),
        ("qwen3_moe", 2, 4, 1, [CHUNKED]),
        ("gpt_oss", 2, 2, 1, []),
        ("gpt_oss", 1, 2, 2, []),
    ],
}
"""Models, numbers of ranks that divide matrices and experts, replicas, and settings, by number of ranks."""
UPDATE = ["trainer.optimizer.lr=1e-2", "trainer.optimizer.eps=1e-3", "trainer.optimizer.max_grad_norm=0.1"]
UPDATE += ["trainer.checkpoint.background=false"]
"""Settings under which gradients are clipped, and Adam does not scale rounding errors to the size of a gradient."""


def configured(folder, tensor=1, expert=1, replicas=1, words=()):
    eager = ["model.attn_implementation=eager"] * (folder.name == "gpt_oss")
    config = config_of(folder, [*words, *eager, *UPDATE])
    config.trainer.tensor_parallel, config.trainer.expert_parallel = tensor, expert
    config.trainer.fsdp.replicas = replicas
    return config


def updated(config, world, folder):
    """Return a learner after two optimiser steps, and the norms of their gradients."""
    learner = make_learner(config, world, str(folder))
    learners = Learners(group_of(world, learner), learner.flops, learner.layout, learner.ranks_per_batch)
    samples = samples_of()
    weights = token_weights(samples, "token_mean", config.algorithm)
    batches = micro_batches(samples, weights, 120, layout=learner.layout, ranks=learners.data_parallel)
    reports = [learners.update([batches], step, 0.0)[1][0] for step in range(2)]
    return learner, [report.grad_norm for report in reports]


def group_of(world, learner):
    return (RankGroup if world.size == 1 else Together)(world, learner)


def whole_state(learner):
    """Return the whole weights and moments of a learner, on every rank."""
    return {n: whole_tensor(v) if hasattr(v, "placements") else v.clone() for n, v in learner.state().items()}


def trained_by(rank, folders, checkpoints):
    """Return what the ranks find for each case. The model of the first case is saved, and loaded by the others."""
    size = dist.get_world_size()
    world = SimpleNamespace(rank=rank, size=size, is_leader=rank == 0, broadcast=broadcast)
    world.background_group = dist.group.WORLD
    found = []
    for number, (model, *parts, words) in enumerate(CASES[size]):
        config = configured(folders[model], *parts, words)
        one = learned(config, world, folders[model])
        learner, one["norms"] = updated(config, world, folders[model])
        one["state"] = whole_state(learner)
        if rank == 0:
            (checkpoints / str(number)).mkdir()
        dist.barrier()
        learner.save(checkpoints / str(number))
        one["sent"] = full_state(learner.policy.model)
        learner = make_learner(config, world, str(folders[model]))
        learner.load(checkpoints / model)
        one["loaded"] = whole_state(learner)
        found.append(one)
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory, tiny_tokenizer):
    """Folders of the models, by name."""
    path = tmp_path_factory.mktemp("models")
    for name, make in MODELS.items():
        torch.manual_seed(0)
        save(make(), tiny_tokenizer, path / name)
    return {name: path / name for name in MODELS}


@pytest.fixture(scope="module")
def checkpoints(folders, tmp_path_factory):
    """Folder of checkpoints by one process after two steps, by model; and the state in each."""
    path, states = tmp_path_factory.mktemp("checkpoints"), {}
    for name, folder in folders.items():
        learner, norms = updated(configured(folder), World(), folder)
        (path / name).mkdir()
        learner.save(path / name)
        states[name] = whole_state(learner), norms
    return path, states


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def ranks(request, folders, checkpoints, tmp_path_factory):
    """Cases with what each rank found, and the folder of the checkpoints that they wrote."""
    own = tmp_path_factory.mktemp("own")
    for name in folders:
        (own / name).symlink_to(checkpoints[0] / name)
    found = run_ranks(request.param, trained_by, tmp_path_factory.mktemp("ranks"), folders, own)
    return list(zip(CASES[request.param], zip(*found, strict=True), strict=True)), own


@pytest.mark.xdist_group("model_parallel")
def test_ranks_that_divide_a_model_find_what_one_process_finds(ranks, folders):
    for (model, *parts, words), found in ranks[0]:
        words = [word for word in words if "offload" not in word]
        expected = learned(configured(folders[model], words=words), World(), folders[model])
        scale = max(float(gradient.abs().max()) for gradient in expected["gradients"])
        assert scale > 1e-3
        for one in found:
            assert_close(one["gradients"], expected["gradients"], scale, f"gradients of {model} in {parts}")
            assert_close(one["passes"], expected["passes"], 10, f"log-probs of {model} in {parts}")
            assert one["metrics"] == pytest.approx(expected["metrics"], rel=1e-4, abs=1e-5), (model, parts)


@pytest.mark.xdist_group("model_parallel")
def test_clipped_updates_and_sent_weights_are_those_of_one_process(ranks, folders):
    for (model, *parts, words), found in ranks[0]:
        words = [word for word in words if "offload" not in word]
        expected, norms = updated(configured(folders[model], words=words), World(), folders[model])
        state = whole_state(expected)
        assert min(norms) > 0.2, "gradients are clipped"
        for one in found:
            assert one["norms"] == pytest.approx(norms, rel=1e-4), (model, parts)
            torch.testing.assert_close(one["state"], state, atol=1e-5, rtol=1e-4)
        assert not any(one["sent"] for one in found[1:])
        for name, value in found[0]["sent"].items():
            assert torch.equal(value, found[0]["state"][f"model.{name}"]), name


@pytest.mark.xdist_group("model_parallel")
def test_checkpoints_of_any_mesh_are_read_by_any_other(ranks, folders, checkpoints):
    """One process reads what ranks wrote, and the reverse, bit for bit."""
    cases, own = ranks
    for number, ((model, *_), found) in enumerate(cases):
        learner = make_learner(configured(folders[model]), World(), str(folders[model]))
        learner.load(own / str(number))
        assert_equal(whole_state(learner), found[0]["state"])
        for one in found:
            assert_equal(one["loaded"], checkpoints[1][model][0])


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    assert any("exp_avg_sq" in name for name in found)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
