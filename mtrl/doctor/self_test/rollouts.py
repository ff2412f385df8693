"""Cases of the local engine, and the sampling that the cases of servers share."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mtrl.config.schema import Config
from mtrl.distributed.world import World
from mtrl.doctor.self_test.bench import Bench
from mtrl.doctor.self_test.drift import DriftStatistics
from mtrl.doctor.self_test.outcome import CaseResult, judged
from mtrl.doctor.self_test.random_model import build_mixture
from mtrl.doctor.self_test.workload import GIB, logprobs_of, make_samples, new_learner, update, vocabulary
from mtrl.engines.base import SamplingParams
from mtrl.trainer.data.batching import PADDED
from mtrl.trainer.loading import compute_dtype
from mtrl.trainer.setup.engine import training_engine
from mtrl.trainer.setup.placement import has_copy
from mtrl.trainer.update.learner import Learner, alone
from mtrl.types import Generation, Sample
from mtrl.utils.expert_ids import before_last_tokens, joined


def local_eager(bench: Bench) -> CaseResult:
    """Sample with the local engine, without CUDA graphs."""
    return _local(bench, "generator.local.cuda_graphs=false")


def local_graphs(bench: Bench) -> CaseResult:
    """Sample with the local engine by CUDA graphs."""
    return _local(bench, "generator.local.cuda_graphs=true")


def router_replay(bench: Bench) -> CaseResult:
    """Sample from a small mixture of experts, and compare log-probs with those of a trainer that chooses experts by
    itself, and of one that replays the engine's choices."""
    bench = replace(bench, model=str(Path(bench.scratch) / "mixture"))
    build_mixture(bench)
    config = bench.config(bench.half, "algorithm.router_replay=true")
    learner = new_learner(bench, config)
    engine = training_engine(config, World(), bench.model, learner.policy, bench.sizes.context)

    async def turns() -> list[Sample]:
        try:
            return await sampled(bench, learner, engine)
        finally:
            await engine.close()

    samples = asyncio.run(turns())
    replayed = drift_of(bench, learner, samples)
    own = drift_of(bench, learner, [replace(sample, experts=None) for sample in samples])
    problem = replayed.problem(compute_dtype(config))
    if any(sample.experts is None or (sample.experts[1:] < 0).any() for sample in samples):
        problem = "the engine did not record the experts of every token"
    if not problem and replayed.mean > 2 * own.mean:
        problem = f"replay raises the mean gap of log-probs from {own.mean:.2g} to {replayed.mean:.2g} nats"
    evidence = f"mean gap {replayed.mean:.1e}, without replay {own.mean:.1e}"
    return judged(problem, evidence, replayed.figures() | {"gap_mean_without_replay_nats": own.mean})


def _local(bench: Bench, override: str) -> CaseResult:
    config = bench.config(*([bench.half] if bench.on_gpu else []), override)
    learner = new_learner(bench, config)
    engine = training_engine(config, World(), bench.model, learner.policy, bench.sizes.context)
    return asyncio.run(sample_before_and_after_update(bench, config, learner, engine, has_copy(config, World())))


async def sample_before_and_after_update(
    bench: Bench,
    config: Config,
    learner: Learner,
    engine: Any,
    sends_weights: bool,
    asleep: Callable[[Callable[[], Any]], Awaitable[None]] | None = None,
) -> CaseResult:
    """Sample, update the policy, send the weights to the engine and sample again; compare log-probs both times.

    Args:
        engine: an `Engine`, which is closed afterwards.
        sends_weights: whether the engine has its own copy of the weights.
        asleep: function that makes the update while the engine sleeps; None: the engine does not sleep.
    """
    learners, dtype = alone(learner), compute_dtype(config)
    samples = make_samples(bench, vocabulary(learner))
    try:
        await sampled(bench, learner, engine)  # kernels are loaded
        start = time.perf_counter()
        turns = await sampled(bench, learner, engine)
        seconds = time.perf_counter() - start
        first = drift_of(bench, learner, turns)
        peak = torch.cuda.max_memory_allocated() if bench.on_gpu else 0

        def train() -> None:
            update(bench, config, learners, samples, 0)

        if asleep is None:
            train()
        else:
            await asleep(train)
        start = time.perf_counter()
        await engine.load_weights(learners.weights() if sends_weights else None, 1)
        loading = time.perf_counter() - start
        second = drift_of(bench, learner, await sampled(bench, learner, engine))
    finally:
        await engine.close()
    rate = sum(sum(turn.loss_mask) for turn in turns) / seconds  # without the tokens of prompts
    problem = first.problem(dtype) or (f"after new weights {text}" if (text := second.problem(dtype)) else "")
    figures = {"tokens_per_second": rate, "load_weights_seconds": loading, **first.figures()}
    figures["gap_mean_after_update_nats"] = second.mean
    evidence = f"{rate:,.0f} tokens/s, {first.line()}"
    if peak:
        figures["peak_bytes"] = peak
        evidence += f", {peak / GIB:.1f} GiB"
    return judged(problem, evidence, figures)


async def sampled(bench: Bench, learner: Learner, engine: Any) -> list[Sample]:
    """Sample one turn of `turn_tokens` tokens for each trajectory, all at once."""
    draw, sizes, words = random.Random(1), bench.sizes, vocabulary(learner)
    prompts = [[draw.randrange(words) for _ in range(sizes.turn_tokens)] for _ in range(sizes.trajectories)]
    names = [f"self-test/{number}" for number in range(sizes.trajectories)]
    for name in names:
        engine.open(name)
    turns = await asyncio.gather(
        *(
            engine.generate(name, prompt, SamplingParams(sizes.turn_tokens, seed=seed))
            for seed, (name, prompt) in enumerate(zip(names, prompts, strict=True))
        )
    )
    for name in names:
        engine.release(name)
    return [_sample(prompt, turn) for prompt, turn in zip(prompts, turns, strict=True)]


def drift_of(bench: Bench, learner: Learner, turns: list[Sample]) -> DriftStatistics:
    """Compare the log-probs of sampled turns with the trainer's."""
    engine = [logprob for turn in turns for logprob, own in zip(turn.logprobs, turn.loss_mask, strict=True) if own]
    trainer: Tensor = logprobs_of(bench, alone(learner), turns, PADDED)
    return DriftStatistics(torch.tensor(engine), trainer.cpu())


def _sample(prompt: list[int], turn: Generation) -> Sample:
    before, own = len(prompt), len(turn.token_ids)
    return Sample(
        token_ids=[*prompt, *turn.token_ids],
        loss_mask=[False] * before + [True] * own,
        logprobs=[0.0] * before + list(turn.logprobs),
        advantages=[0.0] * (before + own),
        versions=[-1] * before + [version for version, count in turn.version_spans for _ in range(count)],
        turns=[-1] * before + [0] * own,
        experts=joined([(before_last_tokens(turn.experts, before + own), before + own)]),
    )
