"""Distillation of a training step: the teacher's log-probs, and the advantages of tokens, turns and groups."""

import numpy as np
import pytest
import torch
from alone import learners_of
from helpers import make_group, split_by_turn
from shard_ranks import on_ranks
from test_loading_ranks import broadcast

from mtrl.algorithms.advantages import turn_advantages
from mtrl.algorithms.signal import is_informative
from mtrl.config.endpoint_schema import BudgetConfig, EndpointConfig, PriceConfig
from mtrl.config.schema import Config
from mtrl.distributed.sharding import full_state
from mtrl.engines.endpoints.budget import Budget
from mtrl.engines.endpoints.prompt_logprobs import PromptScorer
from mtrl.models.tiny import save
from mtrl.trainer.data.batching import balance, micro_batches
from mtrl.trainer.data.samples import Credited, group_samples
from mtrl.trainer.setup.models import make_learner
from mtrl.trainer.update.distillation import Distillation, LocalTeacher, ServedTeacher
from mtrl.trainer.update.policy import Policy
from mtrl.types import Group
from tests.engines.chat_server import ChatServer, Reply


def local_teacher(model, budget=10_000, temperature=1.0, top_k=0):
    learners = learners_of(Config(run_dir="unused"), Policy(model, None))
    learners.rank_group.worker.teacher = Policy(model, None, temperature)
    return LocalTeacher(learners, top_k, budget)


def plain_logprobs(model, sample, temperature=1.0):
    """Return the log-prob of each sampled token by a plain forward pass over the sample."""
    ids = torch.tensor([sample.token_ids])
    with torch.no_grad():
        logprobs = (model(ids).logits[0] / temperature).log_softmax(-1)
    return [logprobs[i - 1, sample.token_ids[i]].item() for i, sampled in enumerate(sample.loss_mask) if sampled]


def credited(groups, config):
    advantages = turn_advantages(groups, config.algorithm)
    pairs = zip(groups, advantages, strict=True)
    return Credited([s for group, turns in pairs for s in group_samples(group, turns)], advantages)


@pytest.mark.parametrize("split", [False, True])
def test_advantages_of_rewards_and_of_the_teacher_add_up(make_tiny_model, split):
    teacher, config = make_tiny_model(1), Config(run_dir="unused")
    groups = [make_group(seed, teacher.config.vocab_size) for seed in range(2)]
    if split:
        groups = [Group(g.group_id, g.row, [split_by_turn(t) for t in g.trajectories]) for g in groups]
    groups[0].trajectories[1].trainable = False
    before, after = credited(groups, config), credited(groups, config)
    distillation = Distillation(local_teacher(teacher, 40, 0.7), weight=0.3, reward_weight=0.5)
    metrics = distillation.apply(groups, after, distillation.score(groups))
    kls = []
    turn_sums = {}
    for sample, changed in zip(before.samples, after.samples, strict=True):
        expected, scores = [], iter(plain_logprobs(teacher, sample, 0.7))
        for at, sampled in enumerate(sample.loss_mask):
            if not sampled:
                expected.append(0.0)
                continue
            kls.append(sample.logprobs[at] - next(scores))
            expected.append(0.5 * sample.advantages[at] - 0.3 * kls[-1])
            place = sample.group_id, sample.trajectory, sample.turns[at]
            turn_sums.setdefault(place, []).append(expected[-1])
        assert changed.advantages == pytest.approx(expected, abs=1e-4)
    assert metrics["distillation/reverse_kl"] == pytest.approx(np.mean(kls), abs=1e-4)
    assert metrics["distillation/advantage_abs"] == pytest.approx(0.3 * np.abs(kls).mean(), abs=1e-4)
    for group, was, turns in zip(groups, before.advantages, after.advantages, strict=True):
        for trajectory in group.trajectories:
            expected = [0.5 * advantage for advantage in was[trajectory.index]]
            if trajectory.trainable:
                expected = [np.mean(turn_sums[group.group_id, trajectory.index, t]) for t in range(len(expected))]
            assert turns[trajectory.index] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("method", ["turn_rloo", "grpo", "mt_grpo", "gigpo", "reinforce_pp", "group_based_per_turn"])
def test_without_rewards_a_single_trajectory_has_an_advantage(make_tiny_model, method):
    teacher, config = make_tiny_model(1), Config(run_dir="unused")
    config.algorithm.advantage_method, config.algorithm.group_size = method, 1
    groups = [make_group(seed, teacher.config.vocab_size, size=1) for seed in range(3)]
    distillation = Distillation(local_teacher(teacher), weight=1.0, reward_weight=0.0)
    found = credited(groups, config)
    distillation.apply(groups, found, distillation.score(groups))
    for sample in found.samples:
        kl = np.array(sample.logprobs)[sample.loss_mask] - plain_logprobs(teacher, sample)
        assert np.array(sample.advantages)[sample.loss_mask] == pytest.approx(-kl, abs=1e-4)
    assert all(is_informative(*pair) for pair in zip(groups, found.advantages, strict=True))


@pytest.mark.parametrize("top_k", [0, 3])
def test_a_server_gives_the_scores_of_the_same_model_here(make_tiny_model, tiny_tokenizer, monkeypatch, top_k):
    """A server with the wire formats of OpenAI and of vLLM, which computes with the teacher, and fails once."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    teacher = make_tiny_model(1)

    def entry(token, logprobs):
        return {"logprob": logprobs[token].item(), "decoded_token": tiny_tokenizer.decode([token])}

    def answer(body, number):
        assert (body["temperature"], body["model"]) == (1.0, "teacher")
        ids = torch.tensor(body["prompt"])
        with torch.no_grad():
            whole = teacher(ids[None]).logits[0].log_softmax(-1)[:-1]
        choice = {}
        if top_k:
            pairs = zip(whole, body["prompt"][1:], strict=True)
            kept = [(row, [token, *row.topk(body["prompt_logprobs"]).indices.tolist()]) for row, token in pairs]
            choice["prompt_logprobs"] = [None, *({str(i): entry(i, row) for i in tokens} for row, tokens in kept)]
        elif body["echo"]:
            texts = [tiny_tokenizer.decode([token]) for token in body["prompt"]]
            found = whole.gather(1, ids[1:, None]).flatten().tolist()
            choice["logprobs"] = {"tokens": [*texts, "next"], "token_logprobs": [None, *found, -0.5]}
        usage = {"prompt_tokens": len(ids), "completion_tokens": 1}
        return Reply(503) if number == 1 else Reply(body={"choices": [choice], "usage": usage})

    groups = [make_group(seed, teacher.config.vocab_size) for seed in range(2)]
    samples = credited(groups, Config(run_dir="unused")).samples
    monkeypatch.setattr("mtrl.engines.endpoints.chat_client.FIRST_PAUSE", 0.01)
    with ChatServer(answer, "/v1/completions") as server:
        budget = Budget("distillation.teacher.endpoint", PriceConfig(), BudgetConfig())
        served = ServedTeacher(PromptScorer.at(server.url, "teacher", EndpointConfig(timeout=20.0), budget, top_k))
        served.check(tiny_tokenizer)
        found = served.scores(samples)
    for mine, theirs in zip(local_teacher(teacher, top_k=top_k).scores(samples), found, strict=True):
        assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
        assert mine.top.ids.shape == (len(mine.logprobs), top_k) and (mine.top.ids == theirs.top.ids).all()
        assert mine.top.logprobs == pytest.approx(theirs.top.logprobs, abs=1e-4)
    metrics = served.metrics()
    assert metrics["requests"] == len(samples) + 2 and metrics["retries"] == 1
    lengths = [len(body["prompt"]) for body in server.requests]
    assert metrics["prompt_tokens"] == sum(lengths) - lengths[1]


def distilled(config, path, groups, rank=0, size=1):
    """Make an update by the teacher's advantages alone, on one of `size` ranks. Return the weights after it, None on
    other ranks than the first."""

    class World:
        is_leader, background_group = rank == 0, None

    World.rank, World.size = rank, size
    World.broadcast = staticmethod(broadcast if size > 1 else lambda value: value)
    learner = make_learner(config, World, path)
    samples = [s for g in groups for s in group_samples(g, [[0.0] * len(t.turns) for t in g.trajectories])]
    total = sum(sample.action_tokens for sample in samples)
    weights = [np.full(len(sample.token_ids), 1 / total) for sample in samples]
    batches = balance(micro_batches(samples, weights, 100, ranks=size), size, learner.flops)[rank]
    top_k = config.distillation.top_k
    for batch, (teacher, *top) in zip(batches, learner.teacher_scores(batches, top_k), strict=True):
        batch.teacher_ids, batch.teacher_logprobs = top
        batch.advantages = teacher - batch.rollout_logprobs
    report = learner.update([batches], 0, 0.0)
    assert report.updates == 1 and report.grad_norm > 0
    return as_arrays(full_state(learner.policy.model))


def as_arrays(state):
    """Return copies of the tensors that another process can read after the end of this one; None for None."""
    return None if state is None else {name: value.clone().numpy() for name, value in state.items()}


def on_rank(config, path, groups):
    return distilled(config, path, groups, torch.distributed.get_rank(), 2)


def test_two_ranks_distil_as_one_process(make_tiny_model, tiny_tokenizer, tmp_path):
    """Policy and teacher are sharded, and the weights after an update are those of one process."""
    save(make_tiny_model(0), tiny_tokenizer, tmp_path / "policy")
    save(make_tiny_model(1), tiny_tokenizer, tmp_path / "teacher")
    config = Config(run_dir="unused")
    config.model.name, config.model.path, config.model.device = "hf", str(tmp_path / "policy"), "cpu"
    config.trainer.fsdp.param_dtype = "float32"
    config.trainer.optimizer.lr, config.trainer.optimizer.eps = 1e-2, 1.0  # the update is then nearly the gradient
    config.distillation.teacher.path, config.distillation.top_k = str(tmp_path / "teacher"), 4
    groups = [make_group(seed, len(tiny_tokenizer)) for seed in range(3)]
    before = as_arrays(full_state(make_tiny_model(0)))
    (found, nothing) = on_ranks(2, tmp_path, on_rank, config, config.model.path, groups)
    config.trainer.fsdp.param_dtype = None
    alone = distilled(config, config.model.path, groups)
    assert nothing is None and found.keys() == alone.keys() == before.keys()
    moved = max(np.abs(alone[name] - before[name]).max() for name in before)
    assert moved > 0
    for name in alone:
        np.testing.assert_allclose(found[name], alone[name], rtol=0.0, atol=1e-3 * moved)
