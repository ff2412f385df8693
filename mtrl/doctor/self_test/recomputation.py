"""The case that compares gradients of recomputed layers, also with their inputs in CPU memory, with those of stored
activations."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from mtrl.doctor.self_test.bench import Bench
from mtrl.doctor.self_test.gradients import distance, loss_of, norm, whole_gradients
from mtrl.doctor.self_test.outcome import CaseResult, judged
from mtrl.doctor.self_test.workload import GIB, batches_of, finish, free_memory, make_samples, new_learner, vocabulary
from mtrl.types import Sample

TOKENS = 2048
"""Number of tokens of the micro-batch: stored activations of the self-test's model take 6.6 GiB with it."""
LARGEST_ERROR = 1e-4
"""Largest difference of the gradients in float32, as a share of their norm: a GPU adds gradients in any order."""


@dataclass(frozen=True)
class MeasuredPass:
    """A forward and a backward pass over one micro-batch."""

    gradients: dict[str, Tensor]
    """Whole gradients by name, on the CPU."""
    seconds: float
    held_bytes: int
    """Allocated GPU memory between the two passes; 0 on a CPU."""
    peak_bytes: int
    """Peak of the allocated GPU memory; 0 on a CPU. With few tokens it is at the end of the backward pass, when
    all gradients exist."""
    layers: int
    """Number of layers of the model."""


def recomputation(bench: Bench) -> CaseResult:
    """Compare gradients, duration and peak memory with stored activations, with half of the layers recomputed, with all
    of them, and with the inputs of all of them in CPU memory."""
    stored = _measured(bench, "trainer.gradient_checkpointing=false")
    recomputed = "trainer.gradient_checkpointing=true"
    ways = {
        "half": (recomputed, f"trainer.recomputed_layers={max(1, stored.layers // 2)}"),
        "all": (recomputed,),
        "offloaded": (recomputed, "trainer.activation_offload=true"),
    }
    errors, passes = {}, {"stored": stored}
    for name, overrides in ways.items():
        found = _measured(bench, *overrides)
        errors[name] = distance(found.gradients, stored.gradients) / norm(stored.gradients)
        passes[name] = replace(found, gradients={})
    worst = max(errors.values())
    problem = "" if worst <= LARGEST_ERROR else f"gradients differ from those of stored activations by {worst:.1e}"
    if bench.on_gpu and not problem and passes["offloaded"].held_bytes >= passes["all"].held_bytes:
        problem = "inputs in CPU memory did not lower the GPU memory between the passes"
    measured = ("seconds", "held_bytes", "peak_bytes")
    figures = {name: {way: getattr(found, name) for way, found in passes.items()} for name in measured}
    return judged(problem, _line(bench, worst, passes), {"relative_error": worst, **figures})


def _line(bench: Bench, error: float, passes: dict[str, MeasuredPass]) -> str:
    same = f"same gradients up to {error:.0e}" if error else "same gradients"
    if not bench.on_gpu:
        return f"{same}; inputs of layers are in CPU memory anyway"
    ways = (
        f"{name} {found.seconds * 1e3:.0f} ms, {found.held_bytes / GIB:.2f} GiB held, peak {found.peak_bytes / GIB:.1f}"
        for name, found in passes.items()
    )
    return f"{same}; {'; '.join(ways)}"


def short_samples(bench: Bench, vocabulary: int) -> list[Sample]:
    """Return samples of at most `TOKENS` tokens in all, but at least one, whose stored activations fit a GPU of
    24 GB."""
    samples = make_samples(bench, vocabulary)
    total = accumulate(len(sample.token_ids) for sample in samples)
    return [sample for sample, tokens in zip(samples, total, strict=True) if tokens <= TOKENS] or samples[:1]


def _measured(bench: Bench, *overrides: str) -> MeasuredPass:
    """Measure the second of two passes over the first micro-batch, since kernels are loaded in the first."""
    learner = new_learner(bench, bench.config("trainer.fsdp.param_dtype=float32", *overrides))
    policy = learner.policy
    batches = batches_of(bench, short_samples(bench, vocabulary(learner)), learner.layout)
    batch = batches[0].to(policy.device)
    seconds, held, peak = 0.0, 0, 0
    for _ in range(2):
        policy.model.zero_grad()
        finish(bench)
        if bench.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        loss = loss_of(policy, batch)
        held = torch.cuda.memory_allocated() if bench.on_gpu else 0
        loss.backward()
        finish(bench)
        seconds = time.perf_counter() - start
        peak = torch.cuda.max_memory_allocated() if bench.on_gpu else 0
    found = whole_gradients(policy)
    layers = policy.model.config.get_text_config().num_hidden_layers
    del learner, policy, batch, loss
    free_memory()
    return MeasuredPass(found, seconds, held, peak, layers)
