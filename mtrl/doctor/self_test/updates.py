"""Cases of the update: in float32 and bfloat16, packed, with flash kernels, compiled, and by sizes of micro-batches."""

from __future__ import annotations

import importlib.util
from dataclasses import asdict
from typing import Any

import torch

from mtrl.doctor.self_test.bench import Bench
from mtrl.doctor.self_test.case import FLASH
from mtrl.doctor.self_test.drift import DriftStatistics
from mtrl.doctor.self_test.outcome import CaseResult, judged
from mtrl.doctor.self_test.workload import (
    UpdateRate,
    free_memory,
    logprobs_of,
    make_samples,
    new_learner,
    timed_updates,
    vocabulary,
)
from mtrl.preflight.result import passed
from mtrl.trainer.data.batching import PADDED
from mtrl.trainer.loading import compute_dtype
from mtrl.trainer.update.learner import alone

CLOSE = 0.97
"""Share of the best rate from which a smaller micro-batch is recommended."""


def update_float32(bench: Bench) -> CaseResult:
    return _measured(bench, "trainer.fsdp.param_dtype=float32")


def update_bfloat16(bench: Bench) -> CaseResult:
    return _measured(bench, bench.half)


def update_compiled(bench: Bench) -> CaseResult:
    return _measured(bench, bench.half, "trainer.compile=true")


def update_flash(bench: Bench) -> CaseResult:
    """Pack samples for the kernels of FlashAttention's own package. PyTorch's flash kernels need no package: the other
    cases use them."""
    name = next(FLASH[module] for module in FLASH if importlib.util.find_spec(module))
    outcome = _measured(bench, bench.half, f"model.attn_implementation={name}")
    return CaseResult(outcome.result, {**outcome.figures, "attn_implementation": name})


def _measured(bench: Bench, *overrides: str) -> CaseResult:
    """Time updates, after a comparison of the log-probs of packed samples with those of padded ones."""
    config = bench.config(*overrides)
    learner = new_learner(bench, config)
    learners, samples = alone(learner), make_samples(bench, vocabulary(learner))
    packed, padded = (logprobs_of(bench, learners, samples, layout) for layout in (learner.layout, PADDED))
    drift = DriftStatistics(packed, padded)
    problem = drift.problem(compute_dtype(config)).replace("engine and trainer", "packed and padded samples")
    rate = timed_updates(bench, config, learner, samples)
    figures = asdict(rate) | {"packing_gap_mean_nats": drift.mean}
    return judged(problem, rate.line(), figures)


def micro_batch_sizes(bench: Bench) -> CaseResult:
    """Time updates with each size of micro-batches; a size that does not fit the GPU ends the series."""
    rates: dict[int, UpdateRate] = {}
    for tokens in bench.sizes.micro_batches:
        config = bench.config(bench.half, f"trainer.max_tokens_per_microbatch={tokens}")
        try:
            learner = new_learner(bench, config)
            rates[tokens] = timed_updates(bench, config, learner, make_samples(bench, vocabulary(learner)))
        except torch.OutOfMemoryError:
            if not rates:
                raise
            break
        del learner
        free_memory()
    best = max(rate.tokens_per_second for rate in rates.values())
    chosen = min(tokens for tokens, rate in rates.items() if rate.tokens_per_second >= CLOSE * best)
    series = ", ".join(f"{tokens:,}: {rate.tokens_per_second:,.0f}" for tokens, rate in rates.items())
    figures: dict[str, Any] = {"tokens": chosen, "by_tokens": {str(n): asdict(rate) for n, rate in rates.items()}}
    return CaseResult(passed(f"tokens/s by tokens: {series}"), figures)
