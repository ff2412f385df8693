"""Cases of FSDP2: the weights after an update are compared with those of the same model in one process."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from mtrl.config.schema import Config
from mtrl.distributed.rank_group import RankGroup
from mtrl.distributed.world import World
from mtrl.doctor.self_test.bench import Bench
from mtrl.doctor.self_test.outcome import CaseResult, judged
from mtrl.doctor.self_test.random_model import build_mixture
from mtrl.doctor.self_test.workload import make_samples, memory_text, planned, update, vocabulary
from mtrl.trainer.loading import fit_attention, load_model
from mtrl.trainer.setup.models import make_learner
from mtrl.trainer.update.learner import Learner, Learners, alone
from mtrl.trainer.update.optimizer import Optimizer
from mtrl.trainer.update.policy import Policy
from mtrl.types import Sample

SHARDED = "trainer.fsdp.param_dtype=float32"
JOIN = 60.0
"""Time limit of waits between ranks, in seconds."""
LARGEST_ERROR = 0.05
"""Largest difference of the weights after an update, as a share of the change by the update. AdamW's first step divides
each gradient by its magnitude, so that the sign of a tiny gradient may change."""


def fsdp(bench: Bench) -> CaseResult | None:
    return _compared(bench)


def fsdp_offload(bench: Bench) -> CaseResult | None:
    return _compared(bench, "trainer.fsdp.cpu_offload=true")


def sequence_parallel(bench: Bench) -> CaseResult | None:
    return _compared(bench, "trainer.sequence_parallel=2")


def tensor_parallel(bench: Bench) -> CaseResult | None:
    return _compared(bench, "trainer.tensor_parallel=2")


def expert_parallel(bench: Bench) -> CaseResult | None:
    mixture = replace(bench, model=str(Path(bench.scratch) / "mixture"))
    return _compared(mixture, "trainer.expert_parallel=2", build=build_mixture)


def _compared(bench: Bench, *overrides: str, build: Callable[[Bench], object] | None = None) -> CaseResult | None:
    """Return the outcome on the leader; followers take part in its updates and return None.

    Args:
        build: function that writes the model first; None: it is there.
    """
    world = World.join(JOIN)
    with closing(world):
        if build is not None:
            world.broadcast(build(bench) if world.is_leader else None)  # the others wait for the model
        config = bench.config(SHARDED, *overrides)
        learner = make_learner(config, world, bench.model)
        samples = make_samples(bench, vocabulary(learner))
        rank_group = RankGroup(world, learner)
        learners = Learners(rank_group, learner.flops, learner.layout, learner.ranks_per_batch)
        if not world.is_leader:
            rank_group.follow()
            return None
        try:
            sharded = _update_twice(bench, config, learners, samples)
        finally:
            rank_group.dismiss()
    del learner, learners, rank_group
    return _outcome(sharded, _plain_update(bench, samples))  # after the group's end: a single process must not use it


@dataclass(frozen=True)
class Sharded:
    """The updates of a sharded model."""

    before: dict[str, Tensor]
    after: dict[str, Tensor]
    """Weights after the first update."""
    tokens_per_second: float
    """Rate of the second update."""
    peak_bytes: int
    planned_bytes: int


def _update_twice(bench: Bench, config: Config, learners: Learners, samples: list[Sample]) -> Sharded:
    if bench.on_gpu:
        torch.cuda.reset_peak_memory_stats()
    before = _weights(learners)
    update(bench, config, learners, samples, 0)
    after = _weights(learners)
    start = time.perf_counter()
    works = update(bench, config, learners, samples, 1).works
    seconds = time.perf_counter() - start
    peak = torch.cuda.max_memory_allocated() if bench.on_gpu else 0
    return Sharded(before, after, sum(work.tokens for work in works) / seconds, peak, planned(bench, config))


def _outcome(sharded: Sharded, expected: Mapping[str, Tensor]) -> CaseResult:
    error = _distance(sharded.after, expected) / _distance(expected, sharded.before)
    problem = "" if error <= LARGEST_ERROR else f"weights differ from those of one process by {error:.1%} of the update"
    same = f"weights of one process up to {error:.0e} of the update" if error else "same weights as one process"
    evidence = f"{sharded.tokens_per_second:,.0f} tokens/s, {same}"
    evidence += memory_text(sharded.peak_bytes, sharded.planned_bytes)
    figures = {
        "tokens_per_second": sharded.tokens_per_second,
        "relative_error": error,
        "peak_bytes": sharded.peak_bytes,
        "planned_bytes": sharded.planned_bytes,
    }
    return judged(problem, evidence, figures)


def _plain_update(bench: Bench, samples: list[Sample]) -> dict[str, Tensor]:
    """Return the weights after the same update of a model that is not sharded."""
    config = bench.config(SHARDED)
    model, tokenizer = load_model(config, bench.model)
    fit_attention(model, config)
    optimizer = Optimizer(model, config.trainer.optimizer, config.trainer.max_steps)
    learners = alone(Learner(config, Policy(model, tokenizer), None, optimizer))
    update(bench, config, learners, samples, 0)
    return _weights(learners)


def _weights(learners: Learners) -> dict[str, Tensor]:
    """Return copies of the weights in CPU memory, whichever device they are gathered on."""
    return {name: weight.to("cpu", copy=True) for name, weight in learners.weights().items()}


def _distance(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    parts = [(one[name].float() - other[name].float()).norm() for name in other]
    return torch.stack(parts).norm().item()
