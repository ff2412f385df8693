"""Updates by ranks that share sequences: gradients, log-probs and values are those of one process, and each rank stores
its part of the activations."""

import random
from functools import partial
from operator import attrgetter
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from test_loading_ranks import broadcast
from transformers import Qwen3Config, Qwen3ForCausalLM

from mtrl.algorithms.reductions import token_weights
from mtrl.command.compose import compose
from mtrl.distributed.rank_group import RankGroup
from mtrl.distributed.sharding import load_state, named_tensors, whole_tensor
from mtrl.distributed.world import World
from mtrl.errors import UserError
from mtrl.models.preparation import prepare_parts
from mtrl.models.sequence_parallel import SequenceGroup
from mtrl.models.tiny import save
from mtrl.trainer.data.batching import PACKED, PADDED, micro_batches
from mtrl.trainer.setup.models import make_learner
from mtrl.trainer.setup.sequence_parallel import check_heads
from mtrl.trainer.update.learner import Learners
from mtrl.trainer.update.optimizer import Optimizer
from mtrl.trainer.update.policy import Policy, part_of
from mtrl.trainer.update.update_report import UpdateReport
from mtrl.types import Sample
from tests.distributed.ranks import run_ranks

TOLERANCE = 1e-5
"""Largest difference in float32, as a share of the largest component."""
CASES = {
    "packed": [],
    "padded": ["trainer.packing=false"],
    "recomputed": ["trainer.gradient_checkpointing=true", "trainer.recomputed_layers=1"],
    "chunked": ["trainer.max_logits_per_chunk=2000"],
    "adapters": ["model.lora_rank=4"],
    "critic": ["algorithm.advantage_method=gae"],
    "every term": [
        "algorithm.loss_fn=gspo",
        "algorithm.off_policy_correction=sequence_tis",
        "algorithm.kl_loss_coef=0.3",
        "algorithm.kl_estimator=k1",
        "algorithm.entropy_coef=0.2",
    ],
}
"""Settings by case; all but `padded` pack samples, with shared prefixes."""
PLACES = {2: {"2 parts": 2}, 4: {"4 parts": 4, "2 groups of 2 parts": 2}}
"""Values of trainer.sequence_parallel by number of ranks."""


def sample_of(rng, prompt, group, index):
    ids = [*prompt, *(rng.randrange(60) for _ in range(rng.randint(2, 14)))]
    mask = [place >= len(prompt) and rng.random() < 0.7 for place in range(len(ids))]
    mask[-1] = True
    numbers = {name: [rng.gauss(-1, 0.7) * m for m in mask] for name in ("logprobs", "advantages")}
    versions = [0 if m else -1 for m in mask]
    return Sample(ids, mask, **numbers, versions=versions, turns=versions, group_id=group, trajectory=index)


def samples_of(seed=0):
    """Return the samples of two groups, of which one has a prompt long enough to be shared in a pack."""
    rng = random.Random(seed)
    prompts = {"long": [rng.randrange(60) for _ in range(70)], "short": [1, 2, 3]}
    return [sample_of(rng, prompt, group, index) for group, prompt in prompts.items() for index in range(4)]


def config_of(folder, more, parts=1):
    words = ["model=hf", f"model.path={folder}", "model.device=cpu", "trainer.fsdp.param_dtype=float32"]
    words += ["algorithm.loss_anchor=old"]  # ratios of 1, so that no token is clipped
    config = OmegaConf.to_object(compose([*words, *more]))
    config.trainer.sequence_parallel, config.trainer.max_tokens_per_microbatch = parts, 120
    return config


class Capture(Optimizer):
    """Optimiser that stores the whole gradients instead of applying them."""

    def step(self, step):
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        self.grads = [whole_tensor(g) if hasattr(g, "placements") else g.clone() for g in grads]
        return 0.0, 0.0


def fill(module, trainable_only):
    """Give weights that begin as 0, such as those of a value head, other values."""
    generator = torch.Generator().manual_seed(1)
    own = named_tensors(module, trainable_only)
    load_state(module, {n: 0.3 * torch.randn(v.shape, generator=generator) for n, v in own.items()}, trainable_only)


class Together:
    """Rank group all of whose ranks make the leader's calls, instead of receiving them."""

    def __init__(self, world, worker):
        self.world, self.worker = world, worker

    def run(self, method, shares, *common):
        value = attrgetter(method)(self.worker)(*shares[self.world.rank], *common)
        values = [None] * self.world.size
        dist.all_gather_object(values, value)
        return values


def learned(config, world, folder):
    """Return what a rank finds by its learners: gradients, metrics, log-probs, most probable tokens and values."""
    learner = make_learner(config, world, str(folder))
    rank_group = (RankGroup if world.size == 1 else Together)(world, learner)
    learners = Learners(rank_group, learner.flops, learner.layout, learner.ranks_per_batch)
    samples = samples_of()
    weights = token_weights(samples, "token_mean", config.algorithm)
    divide = partial(micro_batches, samples, weights, 120, layout=learner.layout, whole_trajectories=True)
    batches = divide(ranks=learners.data_parallel)
    if critic := learner.critic:
        fill(critic.model, trainable_only=False)
        critic.optimizer = Capture(critic.model, config.algorithm.critic.optimizer, 9)
        report = learners.update_critic([[(b, 0 * b.advantages, b.advantages) for b in batches]], 0)
        values = [torch.from_numpy(each) for each in learners.values(samples, 120)]
        return {"gradients": critic.optimizer.grads, "metrics": report.metrics(), "passes": values}
    if learner.policy.adapted:
        fill(learner.policy.model, trainable_only=True)
    learner.optimizer = Capture(learner.policy.model, config.trainer.optimizer, 9)
    _, reports = learners.update([batches], 0, config.algorithm.kl_loss_coef)
    metrics = UpdateReport.joined(reports).metrics()
    passes = [*learners.logprobs(divide()), *learner.policy.top_logprobs(divide()[0], 3)]
    return {"gradients": learner.optimizer.grads, "metrics": metrics, "passes": passes}


def on_a_rank(rank, folder):
    """Return the results of every case, by number of parts; and the bytes of the activations that this rank stores."""
    size = dist.get_world_size()
    world = SimpleNamespace(rank=rank, size=size, is_leader=rank == 0, broadcast=broadcast, background_group=None)
    found = {
        (place, case): learned(config_of(folder, words, parts), world, folder)
        for place, parts in PLACES[size].items()
        for case, words in CASES.items()
        if case in ("packed", "padded", "every term") or parts == size
    }
    return found, activations(SequenceGroup(dist.group.WORLD))


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_tokenizer):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8, "vocab_size": 340}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3}
    path = tmp_path_factory.mktemp("models") / "model"
    save(Qwen3ForCausalLM(Qwen3Config(**sizes, **heads)), tiny_tokenizer, path)
    return path


@pytest.fixture(scope="module")
def alone(folder):
    """The results of one process, by case."""
    return {case: learned(config_of(folder, words), World(), folder) for case, words in CASES.items()}


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=[pytest.mark.slow, pytest.mark.ci])])
def ranks(request, folder, tmp_path_factory):
    return run_ranks(request.param, on_a_rank, tmp_path_factory.mktemp("ranks"), folder)


def assert_close(found, expected, scale, name):
    for mine, truth in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, truth, atol=TOLERANCE * scale, rtol=0, msg=lambda text: f"{name}: {text}")


@pytest.mark.xdist_group("sequence_parallel")
def test_ranks_that_share_sequences_find_what_one_process_finds(ranks, alone):
    for found, _ in ranks:
        for (place, case), one in found.items():
            expected = alone[case]
            scale = max(float(gradient.abs().max()) for gradient in expected["gradients"])
            assert scale > 1e-3
            assert_close(one["gradients"], expected["gradients"], scale, f"gradients of {case} in {place}")
            assert_close(one["passes"], expected["passes"], 10, f"log-probs or values of {case} in {place}")
            assert one["metrics"] == pytest.approx(expected["metrics"], rel=1e-4, abs=1e-5), (place, case)


def activations(group):
    """Return the bytes of the activations that a forward pass over one long sequence stores on this rank; `group` None:
    in one process."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8, "vocab_size": 60}
    model = Qwen3ForCausalLM(Qwen3Config(**sizes, num_attention_heads=4, num_key_value_heads=4)).eval()
    prepare_parts(model, 1 if group is None else group.size)
    ids = [place % 60 for place in range(257)]
    ones = [1.0] * 257
    sample = Sample(ids, [False, *[True] * 256], ones, ones, [0] * 257, [0] * 257)
    (batch,) = micro_batches([sample], [torch.ones(257).numpy()], 1000)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    stored = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            stored[storage.data_ptr()] = storage.nbytes(), tensor  # kept, so that no address is used again
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        logprobs, _ = Policy(model, None, sequence_group=group).logprobs(batch)
    logprobs.sum().backward()
    return sum(size for size, _ in stored.values())


@pytest.mark.xdist_group("sequence_parallel")
def test_a_rank_stores_the_activations_of_its_part(ranks):
    whole = activations(None)
    for _, part in ranks:
        assert 1 / len(ranks) <= part / whole < 1.06 / len(ranks), part / whole


def test_the_heads_of_the_policy_are_checked_before_it_is_loaded(folder):
    check_heads(config_of(folder, [], parts=4))
    with pytest.raises(UserError) as error:
        check_heads(config_of(folder, [], parts=8))
    assert str(error.value) == (
        f"trainer.sequence_parallel=8 does not divide the 4 attention heads of model.path={folder}; use a divisor of 4"
    )


@pytest.mark.parametrize("layout", [PADDED, PACKED])
@given(seed=st.integers(0, 999), size=st.integers(1, 5))
def test_the_parts_of_a_micro_batch_cover_it(layout, seed, size):
    samples = samples_of(seed)[4:]
    (batch,) = micro_batches(samples, [torch.ones(len(s.token_ids)).numpy() for s in samples], 10**4, layout=layout)
    parts = [part_of(batch, None, SimpleNamespace(rank=rank, size=size)) for rank in range(size)]
    width = batch.action_mask.shape[1]
    for name in ("input_ids", "position_ids"):
        joined = torch.cat([part.inputs[name] for part in parts], 1)[:, :width]
        expected = batch.inputs.get(name, torch.arange(width).expand(joined.shape))
        assert torch.equal(joined, expected)
    assert len({part.mask.shape for part in parts}) == 1, "equal parts"
    assert torch.equal(sum(part.chosen.int() for part in parts), torch.ones(len(batch.targets), dtype=torch.int32))
    for rank, part in enumerate(parts):
        shift = rank * part.mask.shape[1] + 1  # the target of a part's last position is the next part's first token
        targets = [int(batch.token_ids[row, column + shift]) for row, column in part.mask.nonzero().tolist()]
        assert targets == part.own(batch.targets).tolist()
