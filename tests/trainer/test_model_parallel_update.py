"""Updates by ranks that divide matrices or experts: gradients, log-probs, weights and checkpoints are those of one
process."""

from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from test_loading_ranks import broadcast
from test_sequence_parallel_update import Together, assert_close, config_of, samples_of
from torch.distributed.tensor import DTensor
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from mtrl.algorithms.reductions import token_weights
from mtrl.config.schema import Config
from mtrl.config.trainer_schema import FsdpConfig
from mtrl.distributed.meshes import ModelParallel, make_meshes
from mtrl.distributed.plans import divide
from mtrl.distributed.rank_group import RankGroup
from mtrl.distributed.sharding import full_state, local_part, named_tensors, whole_tensor
from mtrl.distributed.world import World
from mtrl.doctor.activations import layer_bytes
from mtrl.doctor.architecture import DENSE, MIXTURES, Architecture
from mtrl.doctor.memory import Memory
from mtrl.models.tiny import save
from mtrl.trainer.data.batching import micro_batches
from mtrl.trainer.setup.models import make_learner
from mtrl.trainer.update.learner import Learner, Learners
from mtrl.trainer.update.optimizer import Optimizer
from mtrl.trainer.update.update_report import UpdateReport
from tests.distributed.ranks import run_ranks
from tests.divided_models import CAN_DIVIDE

pytestmark = CAN_DIVIDE

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
TIMEOUT = 77.0
"""Limit of waits between ranks, in seconds."""
TOKENS = 64
"""Number of tokens of the forward pass whose activations are counted."""
CHUNKED = "trainer.max_logits_per_chunk=2000"
TERMS = ["algorithm.kl_loss_coef=0.3", "algorithm.kl_estimator=k1", "algorithm.entropy_coef=0.2"]
RECOMPUTED = "trainer.gradient_checkpointing=true"
CASES = {
    2: [
        ("tied", 2, 1, 1, [CHUNKED, *TERMS]),
        ("llama", 2, 1, 1, [RECOMPUTED, "trainer.packing=false", "trainer.fsdp.cpu_offload=true"]),
        ("qwen3_moe", 2, 2, 1, [RECOMPUTED]),
        ("gpt_oss", 1, 2, 1, []),
    ],
    4: [
        ("qwen3", 2, 1, 1, TERMS),
        ("tied", 2, 1, 2, [CHUNKED]),
        ("qwen3_moe", 1, 2, 1, [CHUNKED]),
        ("qwen3_moe", 2, 4, 1, []),
        ("gpt_oss", 2, 2, 1, []),
        ("gpt_oss", 1, 2, 2, [RECOMPUTED]),
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
    config.trainer.fsdp.replicas, config.trainer.fsdp.timeout = replicas, TIMEOUT
    return config


class Recorder(Optimizer):
    """Optimiser that stores the whole gradients of its first step."""

    grads = None

    def step(self, step):
        self.grads = self.grads or [whole(p.grad) for p in self.parameters]
        return super().step(step)


def whole(value):
    """Return a whole copy of a tensor on every rank."""
    return (whole_tensor(value) if isinstance(value, DTensor) else value).clone()


def trained(config, world, folder):
    """Return a learner after two optimiser steps, and what it found: log-probs before them, gradients and metrics of
    the first step, norms of both, and the whole weights and moments."""
    learner = make_learner(config, world, str(folder))
    learner.optimizer = Recorder(learner.policy.model, config.trainer.optimizer, 9)
    rank_group = (RankGroup if world.size == 1 else Together)(world, learner)
    learners = Learners(rank_group, learner.flops, learner.layout, learner.ranks_per_batch)
    samples = samples_of()
    weights = token_weights(samples, "token_mean", config.algorithm)
    divide = partial(micro_batches, samples, weights, 120, layout=learner.layout)
    found = {"passes": [*learners.logprobs(divide()), *learner.policy.top_logprobs(divide()[0], 3)]}
    batches = divide(ranks=learners.data_parallel)
    reports = [UpdateReport.joined(learners.update([batches], step, 0.3)[1]) for step in range(2)]
    found |= {"metrics": reports[0].metrics(), "norms": [report.grad_norm for report in reports]}
    found["held"] = sum(local_part(parameter).numel() for parameter in learner.policy.model.parameters())
    return learner, found | {"gradients": learner.optimizer.grads, "state": state_of(learner)}


def state_of(learner):
    return {name: whole(value) for name, value in learner.state().items()}


def on_a_rank(rank, folders, checkpoints):
    """Return what this rank finds for each case. It writes a checkpoint, and reads that of one process."""
    size = dist.get_world_size()
    world = SimpleNamespace(rank=rank, size=size, is_leader=rank == 0, broadcast=broadcast)
    world.background_group = dist.group.WORLD
    results = []
    for number, (model, *parts, words) in enumerate(CASES[size]):
        learner, found = trained(configured(folders[model], *parts, words), world, folders[model])
        learner.save(checkpoints / f"ranks-{number}")
        for group in {group for p in learner.policy.model.parameters() for group in p.device_mesh.get_all_groups()}:
            assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=TIMEOUT)
        found["sent"] = full_state(learner.policy.model)
        learner.policy.export(checkpoints / f"export-{number}")
        learner.load(checkpoints / f"alone-{number}")
        results.append(found | {"loaded": state_of(learner)})
    results[0]["activations"] = activations(2) - activations(1)
    return results


def activations(layers):
    """Return the bytes that the forward pass of a model with its matrices in two parts saves for its backward pass."""
    model = LlamaForCausalLM(LlamaConfig(**{**SIZES, "num_hidden_layers": layers}, attn_implementation="sdpa"))
    parallel = ModelParallel(tensor=2)
    divide(model, make_meshes(FsdpConfig(), dist.get_world_size(), torch.device("cpu"), parallel), parallel)
    weights = {local_part(parameter.detach()).untyped_storage().data_ptr() for parameter in model.parameters()}
    stored = {}

    def pack(tensor):
        storage = local_part(tensor.detach()).untyped_storage()
        if storage.data_ptr() not in weights:
            stored[storage.data_ptr()] = storage.nbytes(), tensor  # kept, so that no address is used again
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        logits = model(input_ids=torch.arange(TOKENS)[None], use_cache=False).logits
    del logits
    return sum(size for size, _ in stored.values())


@pytest.fixture(scope="module")
def folders(tmp_path_factory, tiny_tokenizer):
    """Folders of the models, by name."""
    path = tmp_path_factory.mktemp("models")
    for name, make in MODELS.items():
        torch.manual_seed(0)
        save(make(), tiny_tokenizer, path / name)
    return {name: path / name for name in MODELS}


@dataclass
class Compared:
    """A case."""

    name: str
    config: Config
    """That of the ranks."""
    learner: Learner
    """That of one process, which has written its checkpoint."""
    alone: dict
    """What one process found."""
    ranks: tuple
    """What each rank found."""
    checkpoint: Path
    """That of the ranks."""
    export: Path
    """Folder of the model that the ranks exported."""


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=[pytest.mark.slow, pytest.mark.ci])])
def compared(request, folders, tmp_path_factory):
    cases, path, alone = CASES[request.param], tmp_path_factory.mktemp("checkpoints"), []
    for number, (model, *_, words) in enumerate(cases):
        alone.append(trained(configured(folders[model], words=words), World(), folders[model]))
        for who in ("ranks", "alone"):
            (path / f"{who}-{number}").mkdir()
        alone[-1][0].save(path / f"alone-{number}")
    found = zip(*run_ranks(request.param, on_a_rank, tmp_path_factory.mktemp("ranks"), folders, path), strict=True)
    results = []
    for number, ((model, *parts, words), one, ranks) in enumerate(zip(cases, alone, found, strict=True)):
        config = configured(folders[model], *parts, words)
        written = path / f"ranks-{number}", path / f"export-{number}"
        results.append(Compared(f"{model} in {parts}", config, *one, ranks, *written))
    return results


@pytest.mark.xdist_group("model_parallel")
def test_ranks_that_divide_a_model_find_what_one_process_finds(compared):
    for case in compared:
        scale = max(float(gradient.abs().max()) for gradient in case.alone["gradients"])
        assert scale > 1e-3 and min(case.alone["norms"]) > 0.2, "there are gradients, and they are clipped"
        for found in case.ranks:
            assert_close(found["gradients"], case.alone["gradients"], scale, f"gradients of {case.name}")
            assert_close(found["passes"], case.alone["passes"], 10, f"log-probs of {case.name}")
            assert found["metrics"] == pytest.approx(case.alone["metrics"], rel=1e-4, abs=1e-5), case.name
            assert found["norms"] == pytest.approx(case.alone["norms"], rel=1e-4), case.name
            torch.testing.assert_close(found["state"], case.alone["state"], atol=1e-5, rtol=1e-4)


@pytest.mark.xdist_group("model_parallel")
def test_whole_weights_are_sent_to_an_engine_and_exported(compared):
    for case in compared:
        expected = {name: value for name, value in case.ranks[0]["state"].items() if name.startswith("model.")}
        sent = {f"model.{name}": value for name, value in case.ranks[0]["sent"].items()}
        assert not any(found["sent"] for found in case.ranks[1:])
        exported = AutoModelForCausalLM.from_pretrained(case.export, dtype=torch.float32)
        saved = {f"model.{name}": value for name, value in named_tensors(exported).items()}
        for found in (sent, saved):
            assert found.keys() >= expected.keys(), case.name
            assert all(torch.equal(found[name], value) for name, value in expected.items()), case.name


@pytest.mark.xdist_group("model_parallel")
def test_the_memory_plan_counts_the_parameters_and_activations_of_the_ranks(compared):
    part = Architecture.of(LlamaConfig(**SIZES).to_dict(), "").part(tensor=2, expert=1)
    assert {found["activations"] for found in compared[0].ranks} == {TOKENS * layer_bytes(part, 4, TOKENS)}
    for case in compared:
        shape = case.learner.policy.model.config.to_dict()
        if shape["model_type"] not in (*DENSE, *MIXTURES):
            continue
        counted = Memory(case.config, Architecture.of(shape, "")).parameters_of_a_copy
        held = sum(found["held"] for found in case.ranks) / case.config.trainer.fsdp.replicas
        assert counted == pytest.approx(held, rel=0.005), case.name  # a vocabulary of 339 counts as two halves of 170


@pytest.mark.xdist_group("model_parallel")
def test_checkpoints_of_any_mesh_are_read_by_any_other(compared):
    """One process reads what ranks wrote, and the reverse, bit for bit."""
    for case in compared:
        for found in case.ranks:
            assert_equal(found["loaded"], case.alone["state"], case.name)
        case.learner.load(case.checkpoint)
        assert_equal(state_of(case.learner), case.ranks[0]["state"], case.name)


def assert_equal(found, expected, name):
    assert found.keys() == expected.keys() and any("exp_avg_sq" in key for key in found)
    for key, value in expected.items():
        assert torch.equal(found[key], value), (name, key)
