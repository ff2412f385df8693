"""Updates with router replay: the experts of the engine reach the trainer's passes, in every layout of samples."""

import asyncio
import copy
import json
import logging
import random
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from alone import learners_of, updater_of
from helpers import make_group, make_turn
from shard_ranks import on_ranks
from torch.distributed.tensor import DTensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from mtrl.config.model_schema import ModelConfig
from mtrl.config.schema import Config
from mtrl.config.trainer_schema import FsdpConfig, OptimizerConfig
from mtrl.distributed.meshes import ModelParallel
from mtrl.distributed.sharding import shard
from mtrl.engines.base import SamplingParams
from mtrl.engines.local.engine import LocalEngine
from mtrl.models.experts import chosen_experts, recorded, routers_of
from mtrl.models.lora import add_adapters
from mtrl.models.packing import MIN_PREFIX
from mtrl.models.preparation import checkpoint_gradients, prepare_packing, prepare_parts
from mtrl.models.router_replay import RouterReplay
from mtrl.models.sequence_parallel import SequenceGroup
from mtrl.record.trajectories import write_groups
from mtrl.rollout.conversation import Conversation, SingleMessageConversation
from mtrl.trainer.data.batching import PACKED, PADDED, SHARED, micro_batches
from mtrl.trainer.data.experience import Unused
from mtrl.trainer.data.samples import group_samples, trajectory_samples
from mtrl.trainer.setup.models import WithoutAdapters
from mtrl.trainer.update.optimizer import Optimizer
from mtrl.trainer.update.policy import Policy
from mtrl.types import Group, Sample, Trajectory, read_trajectories
from mtrl.utils.expert_ids import from_text, to_text
from tests.divided_models import CAN_DIVIDE

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "head_dim": 8, "vocab_size": 64, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "num_experts_per_tok": 2, "num_local_experts": 8, "moe_intermediate_size": 16}


def mixture(**sizes):
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES | sizes, initializer_range=0.5)).eval()


def replaying(model, **settings):
    return Policy(model, None, router_replay=RouterReplay(model), **settings)


def random_experts(rng, tokens):
    """Return random experts [tokens, 2 layers, 2], the choices of a token all different."""
    return rng.random((tokens, 2, 8)).argsort(-1)[..., :2].astype(np.int8)


def noted(group, seed=0):
    """Return the group with random experts in each turn; the first row of a sample is unknown, as engines leave it."""
    rng = np.random.default_rng(seed)
    for trajectory in group.trajectories:
        for index, turn in enumerate(trajectory.turns):
            experts = random_experts(rng, len(turn.observation_ids) + len(turn.action_ids))
            if turn.before(index) is None:
                experts[0] = -1
            turn.experts = to_text(experts)
    return group


def samples_of(group):
    return group_samples(group, [[1.0] * len(t.turns) for t in group.trajectories])


def config(**algorithm):
    cfg = Config(run_dir="unused")
    cfg.algorithm = replace(cfg.algorithm, router_replay=True, **algorithm)
    return cfg


# -- samples and micro-batches ----------------------------------------------------------------------------------------


def test_rows_of_turns_become_rows_of_samples():
    """A break gives the tokens that it repeats the experts of its own turn; a turn without ids gets -1."""
    group = noted(make_group(1, 64, size=1, turns=1))
    (trajectory,) = group.trajectories
    rng = random.Random(3)
    trajectory.turns += [make_turn(rng, 64), make_turn(rng, 64, "edited"), make_turn(rng, 64)]
    turns = noted(group).trajectories[0].turns
    turns[1].experts = None
    first, second = trajectory_samples(trajectory, [0.0] * 4)
    missing = len(turns[1].observation_ids) + len(turns[1].action_ids)
    known = from_text(turns[0].experts)
    assert first.experts.tolist() == [*known.tolist(), *np.full((missing, 2, 2), -1).tolist()]
    both = np.concatenate([from_text(turns[2].experts), from_text(turns[3].experts)])
    assert second.experts.tolist() == both.tolist() and len(both) == len(second.token_ids)
    turns[0].experts = None
    assert trajectory_samples(trajectory, [0.0] * 4)[0].experts is None


def sample_after(rng, prompt, prompt_experts, index):
    """Return a sample of a prompt, whose experts are given, and a few sampled tokens."""
    length = int(rng.integers(2, 9))
    total = len(prompt) + length
    mask = np.arange(total) >= len(prompt)
    experts = np.concatenate([np.full((1, 2, 2), -1, np.int8), prompt_experts, random_experts(rng, length - 1)])
    tokens = [*prompt, *rng.integers(0, 64, length).tolist()]
    numbers = [0.0] * total
    turns = np.where(mask, 0, -1).tolist()
    return Sample(tokens, mask.tolist(), numbers, numbers, turns, turns, "g", index, experts=experts)


def prompts(rng, length, differs_at=None):
    """Return four samples of one prompt; from the given token on, the prompt of the last two has other experts."""
    prompt, experts = rng.integers(0, 64, length).tolist(), random_experts(rng, length)
    others = experts.copy()
    if differs_at is not None:
        others[differs_at:] = random_experts(rng, length - differs_at)
    return [sample_after(rng, prompt, experts if index < 2 else others, index) for index in range(4)]


def logprobs_by(policy, samples, layout):
    batches = micro_batches(samples, [np.ones(len(s.token_ids)) for s in samples], 9999, layout=layout)
    found = {}
    for batch in batches:
        with policy.replaying(batch), torch.no_grad():
            values = policy.logprobs(batch)[0]
        found |= zip(batch.rows, values.split([s.action_tokens for s in batch.samples]), strict=True)
    return [found[row] for row in range(len(samples))], batches


@pytest.mark.parametrize("differs_at", [None, 100, 70, 10])
@pytest.mark.parametrize("layout", [PADDED, PACKED, SHARED])
def test_every_layout_replays_the_experts_of_each_sample(layout, differs_at):
    """A shared prefix ends before the first token that went to other experts."""
    model = mixture()
    prepare_packing(model)
    policy, samples = replaying(model), prompts(np.random.default_rng(0), 120, differs_at)
    found, (batch,) = logprobs_by(policy, samples, layout)
    for sample, values in zip(samples, found, strict=True):
        mask = torch.tensor(sample.loss_mask[1:])
        with RouterReplay(model).replaying(torch.from_numpy(sample.experts[None, 1:])), torch.no_grad():
            logits = model(input_ids=torch.tensor([sample.token_ids[:-1]])).logits[0]
        expected = logits.log_softmax(-1).gather(-1, torch.tensor(sample.token_ids[1:])[:, None])[mask, 0]
        torch.testing.assert_close(values, expected, rtol=1e-4, atol=1e-4)
    if layout is SHARED:
        whole = sum(len(sample.token_ids) for sample in samples)
        shared = 120 - 1 if differs_at is None else differs_at
        third = shared if shared >= MIN_PREFIX else 0
        assert batch.token_ids.shape[1] == whole - 2 * (120 - 1) - third
    own, _ = logprobs_by(Policy(model, None), samples, layout)
    assert (torch.cat(own) - torch.cat(found)).abs().max() > 0.1, "or the choices do not matter"


# -- updates ----------------------------------------------------------------------------------------------------------


def update_of(cfg, policy, samples, tmp_path, reference=None):
    optimizer = Optimizer(policy.model, OptimizerConfig(lr=0.0), 99)
    return updater_of(cfg, policy, reference, optimizer, tmp_path / "dump").run(samples, 0)


@pytest.mark.parametrize("anchor", ["rollout", "old"])
def test_an_update_uses_the_recorded_experts(anchor, tmp_path):
    """Log-probs, anchors and gradients are those of the recorded experts, also where activations are recomputed."""
    samples = samples_of(noted(make_group(3, 64)))
    model, recomputed = mixture(), mixture()
    checkpoint_gradients(recomputed)
    result = update_of(config(loss_anchor=anchor), replaying(model), samples, tmp_path)
    again = update_of(config(loss_anchor=anchor), replaying(recomputed), samples, tmp_path)
    metrics = result.report.metrics()
    assert again.report.metrics() == metrics
    assert metrics["train/experts/replayed"] == 1.0
    expected, _ = logprobs_by(replaying(model), samples, PADDED)
    by_sample = {id(sample): values for sample, values in zip(samples, expected, strict=True)}
    for sample, values in result.first_logprobs:
        torch.testing.assert_close(values, by_sample[id(sample)])
    if anchor == "old":
        assert metrics["train/loss"] == pytest.approx(-1.0)  # the ratio is 1 everywhere
    own = update_of(config(loss_anchor=anchor), Policy(model, None), samples, tmp_path).report.metrics()
    assert own["train/grad_norm"] != pytest.approx(metrics["train/grad_norm"], rel=1e-3)
    assert "train/experts/replayed" not in own


def test_tokens_without_recorded_experts_are_counted(tmp_path):
    group = noted(make_group(3, 64))
    for trajectory in group.trajectories[1:]:
        for turn in trajectory.turns:
            turn.experts = None
    samples = samples_of(group)
    known = sum(sample.action_tokens for sample in samples if sample.trajectory == 0)
    metrics = update_of(config(), replaying(mixture()), samples, tmp_path).report.metrics()
    assert metrics["train/experts/replayed"] == pytest.approx(known / sum(s.action_tokens for s in samples))


@pytest.mark.parametrize("adapted", [False, True])
def test_the_reference_chooses_by_itself(adapted, tmp_path):
    """The KL to a reference with the policy's own weights is that between replayed and own choices."""
    samples = samples_of(noted(make_group(3, 64)))
    model = mixture()
    reference = Policy(copy.deepcopy(model), None)
    if adapted:
        model = add_adapters(model, ModelConfig(lora_rank=2), 0)
    policy = replaying(model)
    own, _ = logprobs_by(reference, samples, PADDED)
    replayed, _ = logprobs_by(policy, samples, PADDED)
    gap = torch.cat(own) - torch.cat(replayed)
    metrics = update_of(
        config(kl_loss_coef=0.1), policy, samples, tmp_path, WithoutAdapters(policy) if adapted else reference
    ).report.metrics()
    assert metrics["train/kl"] == pytest.approx((gap.exp() - gap - 1).mean().item(), rel=1e-3)


def results_in_parts(samples):
    """Return the log-probs and the gradients of the routers by a whole model, and by this rank's parts of the rows, for
    two layouts of the samples."""
    found, group = [], SequenceGroup(dist.group.WORLD)
    for layout in (PADDED, SHARED):
        (batch,) = micro_batches(samples, [np.ones(len(s.token_ids)) for s in samples], 9999, layout=layout)
        for own in (None, group):
            model = mixture()
            prepare_parts(model, 2)
            policy = replaying(model, sequence_group=own)
            with policy.replaying(batch):
                logprobs = policy.logprobs(batch)[0]
                logprobs.square().sum().backward()
            gradients = [p.grad for router in routers_of(model) for p in router.parameters()]
            if own is not None:
                for gradient in gradients:
                    dist.all_reduce(gradient)
            found.append([values.detach().numpy() for values in (logprobs, *gradients)])
    return found


def test_ranks_that_share_sequences_find_what_one_process_finds(tmp_path):
    samples = prompts(np.random.default_rng(0), 121, 70)
    for padded, padded_parts, shared, shared_parts in on_ranks(2, tmp_path, results_in_parts, samples):
        for whole, parts in ((padded, padded_parts), (shared, shared_parts)):
            for one, other in zip(whole, parts, strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-3)


def results_of_ranks(samples, parallel):
    """Return the log-probs of this rank's micro-batches and the gradients of the routers after all micro-batches, by a
    whole model and by two ranks. Ranks that divide matrices have the same micro-batches."""
    batches = micro_batches(samples, [np.ones(len(s.token_ids)) for s in samples], 1, ranks=2)
    mine = batches if parallel.tensor > 1 else batches[dist.get_rank() :: 2]
    found = []
    for is_whole in (True, False):
        model = mixture()
        checkpoint_gradients(model)
        policy, logprobs = replaying(model), {}
        if not is_whole:
            shard(model, FsdpConfig(), SimpleNamespace(rank=dist.get_rank(), size=2), parallel=parallel)
        for batch in batches if is_whole else mine:
            with policy.replaying(batch):
                logprobs[id(batch)] = policy.logprobs(batch)[0]
                logprobs[id(batch)].sum().backward()
        gradients = [p.grad for router in routers_of(model) for p in router.parameters()]
        gradients = [g.full_tensor() if isinstance(g, DTensor) else g for g in gradients]
        found.append([values.detach().numpy() for values in (*(logprobs[id(b)] for b in mine), *gradients)])
    return found


@pytest.mark.parametrize(
    "parallel",
    [
        pytest.param(ModelParallel(), id="sharded"),
        pytest.param(ModelParallel(expert=2), id="experts", marks=CAN_DIVIDE),
        pytest.param(ModelParallel(tensor=2, expert=2), id="matrices and experts", marks=CAN_DIVIDE),
    ],
)
def test_ranks_find_what_one_process_finds(parallel, tmp_path):
    samples = samples_of(noted(make_group(3, 64)))[:4]
    for whole, parts in on_ranks(2, tmp_path, results_of_ranks, samples, parallel):
        for one, other in zip(whole, parts, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


def test_a_dense_model_is_named_in_a_warning(make_tiny_model, caplog):
    with caplog.at_level(logging.WARNING):
        learners_of(config(), Policy(make_tiny_model(), None))
    assert "algorithm.router_replay=true has no effect" in caplog.text


# -- from the engine to the trainer -----------------------------------------------------------------------------------


async def conversation_of(layout, codec, engine, name, turns=3):
    messages = [{"role": "user", "content": "how many apples are 12 + 34?"}]
    conversation = layout(codec, messages)
    for turn in range(turns):
        stops = codec.stop_token_ids if name == "0" else ()
        sampling = SamplingParams(max_generate_length=6, seed=turn, stop_token_ids=stops)
        conversation.add_action(await engine.generate(name, conversation.prompt, sampling))
        if turn < turns - 1:
            conversation.add_observation([{"role": "tool", "content": "46 apples"}])
    engine.release(name)
    return Trajectory("t", "g", int(name), conversation.turns)


@pytest.mark.parametrize("layout", [Conversation, SingleMessageConversation])
def test_the_trainer_chooses_as_the_engine_did(layout, tiny_codec):
    """The engine computes in bfloat16. The experts in the trainer's passes, in float32, are those that the engine
    recorded, and the trainer alone would choose others for some tokens."""
    model = mixture(vocab_size=len(tiny_codec.tokenizer))
    engine = LocalEngine(copy.deepcopy(model).bfloat16(), tiny_codec.tokenizer, record_experts=True)

    async def play():
        for name in "012":
            engine.open(name)
        return await asyncio.gather(*(conversation_of(layout, tiny_codec, engine, name) for name in "012"))

    trajectories = asyncio.run(play())
    samples = samples_of(Group("g", {"id": "t"}, list(trajectories)))
    chosen = {}
    for kind, policy in {"replayed": replaying(model), "own": Policy(model, None)}.items():
        (batch,) = micro_batches(samples, [np.ones(len(s.token_ids)) for s in samples], 9999)
        with policy.replaying(batch), recorded(routers_of(model)) as routing, torch.no_grad():
            policy.logprobs(batch)
        chosen[kind] = chosen_experts(routing).unflatten(0, batch.action_mask.shape)
    known = batch.experts >= 0
    assert all((sample.experts[1:] >= 0).all() and (sample.experts[0] == -1).all() for sample in samples)
    assert (chosen["replayed"][known] == batch.experts[known]).all()
    assert (chosen["own"][known] != batch.experts[known]).any()


# -- files ------------------------------------------------------------------------------------------------------------


def test_checkpoints_keep_the_experts_and_records_leave_them_out(tmp_path):
    group = noted(make_group(3, 64))
    stored = Unused(4, 2, group).to_dict()
    restored = Unused.from_dict(json.loads(json.dumps(stored))).group
    assert restored == group
    one, other = samples_of(group), samples_of(restored)
    assert all((a.experts == b.experts).all() for a, b in zip(one, other, strict=True))
    path = write_groups(tmp_path, "train", 1, [group])
    assert "experts" not in path.read_text()
    assert all(turn.experts is None for trajectory in read_trajectories(path) for turn in trajectory.turns)
    assert "experts" not in json.dumps(Unused(0, 0, make_group(3, 64)).to_dict())
