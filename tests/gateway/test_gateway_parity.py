"""Episodes of a program are trained like those of an environment: same tokens, masks, log-probs and gradients.

The tests use real sockets and the local engine, which shares the trained weights.
"""

import asyncio
import copy
import random
from dataclasses import asdict, replace
from functools import partial

import pytest
import torch

from envs.gsm8k.data import gold, load
from envs.gsm8k.environment import Gsm8kEnv
from mtrl.agents.callable import CallableRunner
from mtrl.agents.loop import AgentLoop
from mtrl.algorithms.reductions import token_weights
from mtrl.config.algorithm_schema import AlgorithmConfig
from mtrl.config.schema import Config, DataConfig
from mtrl.engines.base import SamplingParams
from mtrl.engines.local.engine import LocalEngine
from mtrl.environments.pool import EnvironmentPool
from mtrl.gateway.server import Gateway
from mtrl.gateway.session import SessionLimits
from mtrl.models.sft import MixedOptimizer, batches, fine_tune, to_example
from mtrl.models.tiny import make_model
from mtrl.rollout.conversation import Conversation
from mtrl.rollout.episode import EpisodeLimits, EpisodeLoop
from mtrl.trainer.data.batching import PACKED, PADDED, micro_batches
from mtrl.trainer.data.samples import group_samples
from mtrl.trainer.update.learner import Learner
from mtrl.trainer.update.optimizer import Optimizer
from mtrl.trainer.update.policy import Policy
from mtrl.types import Demonstration, Group

TURNS, CONTEXT, TEMPERATURE = 3, 200, 0.9
EPISODES = 12
LIMITS = EpisodeLimits(TURNS, CONTEXT, 20, 60, 0)
LAYOUTS = pytest.mark.parametrize("layout", [PADDED, PACKED], ids=["padded", "packed"])


@pytest.fixture(scope="module")
def rows():
    """Rows in which each problem occurs twice in sequence."""
    problems = load(DataConfig(synthetic_train_rows=64, synthetic_test_rows=1), 0, calculator=True, operations=1).train
    return [row for row in problems[: EPISODES // 2] for _ in range(2)]


@pytest.fixture(scope="module")
def model(tiny_recipe, tiny_codec, rows):
    """A partly trained model, which calls the calculator, answers right and wrong, and also samples nonsense."""
    torch.set_num_threads(1)
    model = make_model(replace(tiny_recipe, init_std=0.05), tiny_codec.tokenizer, 0)
    reply = []
    for row in rows:
        compute, answer = gold(row)
        reply.append([*row["prompt"], {"role": "assistant", "content": compute}])
        reply.append([*row["prompt"], {"role": "assistant", "content": answer}])
    examples = [to_example(tiny_codec.renderer, Demonstration(messages)) for messages in reply]
    fine_tune(model, batches(examples, 8, random.Random(0)), 100, MixedOptimizer(model, None, 0.02), warmup=1)
    return model.eval()


class StoringEngine(LocalEngine):
    """Stores each prompt and its generation, in the order of the requests."""

    async def generate(self, trajectory_id, prompt, sampling):
        stored = vars(self).setdefault("stored", [])
        stored.append([list(prompt), None])
        requested = stored[-1]
        requested[1] = await super().generate(trajectory_id, prompt, sampling)
        return requested[1]


def run_rows(make_loop, model, codec, rows):
    """Run episodes of these rows, and return the trajectories as groups, and the engine."""

    async def whole():
        engine = StoringEngine(model, codec.tokenizer, 16, CONTEXT)
        sampling = SamplingParams(12, TEMPERATURE, stop_token_ids=codec.stop_token_ids)
        loop = make_loop(engine, codec)
        try:
            finished = await asyncio.gather(
                *(loop.run(row, row["id"], i, replace(sampling, seed=100 * i)) for i, row in enumerate(rows))
            )
        finally:
            await loop.close()
            await engine.close()
        found = dict.fromkeys(row["id"] for row in rows)
        return [Group(i, {}, [t for t in finished if t.group_id == i]) for i in found], engine

    return asyncio.run(asyncio.wait_for(whole(), 60))


def natively(engine, codec):
    environment = partial(Gsm8kEnv, TURNS, calculator=True)
    return EpisodeLoop(engine, environment, partial(Conversation, codec), EnvironmentPool(EPISODES), LIMITS)


def by(program, calls=TURNS):
    """Return a function that makes the loop for the episodes of this program."""

    def make(engine, codec):
        gateway = Gateway(engine, codec, SessionLimits(calls, 4, CONTEXT))
        return AgentLoop(gateway, CallableRunner(program, EPISODES), LIMITS, EPISODES)

    return make


async def solve(row, client):
    """Program that sends the messages of the environment, and reports its rewards."""
    environment, messages, rewards = Gsm8kEnv(TURNS, calculator=True), list(row["prompt"]), []
    environment.reset(row)
    while True:
        message = await client.achat(messages)
        result = environment.step(message["content"], row["ground_truth"])
        rewards.append(result.reward)
        if result.done:
            return rewards
        messages += [message, {"role": "user", "content": result.observation}]


def samples_of(groups):
    """Return samples whose advantages are the rewards plus a number per turn, so that all turns have a gradient."""
    advantages = [[[r + 0.1 * (i + 1) for i, r in enumerate(t.rewards)] for t in g.trajectories] for g in groups]
    return [sample for pair in zip(groups, advantages, strict=True) for sample in group_samples(*pair)]


class Capture(Optimizer):
    """Optimiser that stores the gradients instead of applying them."""

    def step(self, step):
        self.grads = [p.grad.clone() for p in self.parameters]
        for p in self.parameters:
            p.grad = None
        return 0.0, 0.0


def update(model, samples, layout):
    """Make an update, and return its report, the micro-batches and the gradients."""
    config = Config(run_dir="unused", algorithm=AlgorithmConfig(loss_fn="ppo"))
    weights = token_weights(samples, "token_mean", config.algorithm)
    dealt = micro_batches(samples, weights, 256, layout=layout)
    optimizer = Capture(model, config.trainer.optimizer, 10)
    report = Learner(config, Policy(model, None, TEMPERATURE), None, optimizer).update([dealt], 0, 0.0)
    return report, dealt, optimizer.grads


@LAYOUTS
def test_gradients_of_a_program_equal_those_of_the_environment(model, tiny_codec, rows, layout):
    native, _ = run_rows(natively, model, tiny_codec, rows)
    ours, _ = run_rows(by(solve), model, tiny_codec, rows)
    turns = [turn for group in native for t in group.trajectories for turn in t.turns]
    assert all(t.error is None for group in [*native, *ours] for t in group.trajectories)
    assert {len(t.turns) for group in native for t in group.trajectories} > {1}, "some solve it, others do not"
    assert any("<calc>" in turn.text for turn in turns)
    assert [asdict(sample) for sample in samples_of(ours)] == [asdict(sample) for sample in samples_of(native)]
    (report, _, expected), (ours_report, _, found) = (
        update(model, samples_of(groups), layout) for groups in (native, ours)
    )
    assert ours_report.loss == report.loss and ours_report.trained_tokens == report.trained_tokens > 100
    assert any(g.abs().max() > 1e-3 for g in expected)
    for mine, its in zip(found, expected, strict=True):
        assert torch.equal(mine, its)


async def wander(row, client):
    """Retries, branches, returns a stripped answer, uses a helper, calls in parallel, and compacts its context."""
    requested = list(row["prompt"])
    more, other = {"role": "user", "content": "more"}, {"role": "user", "content": "other"}
    first = await client.achat(requested)
    await client.achat(requested)
    second = await client.achat([*requested, {**first, "content": f" {first['content'].strip()}\n"}, more])
    await client.achat([*requested, first, other])
    await client.achat([{"role": "user", "content": "help"}])
    third = [*requested, first, more, second, more]
    await asyncio.gather(client.achat(third), client.achat(third))
    await client.achat([{"role": "user", "content": "in short"}, *requested[-1:], more])
    await client.achat([*requested, first, more, {"role": "assistant", "content": "never sampled"}, more])
    return 1.0


@LAYOUTS
def test_every_token_of_a_call_tree_is_trained_once_after_its_context(model, tiny_codec, rows, layout):
    model = copy.deepcopy(model).double()  # so that log-probs depend only on their context
    groups, engine = run_rows(by(wander, calls=9), model, tiny_codec, rows[::4])
    trajectories = [t for group in groups for t in group.trajectories]
    assert [t.error for t in trajectories] == [None] * len(trajectories) and len(engine.stored) == 9 * len(trajectories)
    reasons = {turn.break_reason for t in trajectories for turn in t.turns}
    assert reasons == {None, "retry", "branch", "fresh", "edited"}
    assert all(t.turns[2].before(2) is not None for t in trajectories), "an answer that came back stripped"
    samples = samples_of(groups)
    trained = []
    for sample in samples:
        for turn in sorted({turn for turn in sample.turns if turn >= 0}):
            start, length = sample.turns.index(turn), sample.turns.count(turn)
            ids, logprobs = sample.token_ids[: start + length], sample.logprobs[start : start + length]
            assert sample.loss_mask[start : start + length] == [True] * length
            trained.append((ids[:start], ids[start:], logprobs))
    requested = [(prompt, reply.token_ids, reply.logprobs) for prompt, reply in engine.stored]
    assert sorted(trained) == sorted(requested) and sum(map(sum, (s.loss_mask for s in samples))) == sum(
        len(reply) for _, reply, _ in requested
    )
    for prompt, reply, logprobs in trained:
        torch.testing.assert_close(alone(model, prompt, reply), torch.tensor(logprobs), atol=1e-5, rtol=0)
    report, dealt, grads = update(model, samples, layout)
    assert report.trained_tokens == sum(len(reply) for _, reply, _ in requested)
    for batch, by_trainer in zip(dealt, report.first_logprobs, strict=True):
        torch.testing.assert_close(by_trainer.float(), batch.rollout_logprobs, atol=1e-5, rtol=0)
    assert any(g.abs().max() > 1e-3 for g in grads)


@torch.no_grad()
def alone(model, prompt, reply):
    """Return the log-probs of an answer after its own context alone."""
    logits = model(input_ids=torch.tensor([prompt + reply])).logits[0, len(prompt) - 1 : -1]
    return (logits / TEMPERATURE).log_softmax(-1).gather(-1, torch.tensor(reply)[:, None])[:, 0].float()
