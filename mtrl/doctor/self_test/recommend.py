"""Settings that follow from the figures of a self-test. This module does not import torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mtrl.doctor.memory import PROCESS, SLACK
from mtrl.doctor.self_test.outcome import CaseResult

FASTER = 1.03
"""Least ratio of two rates at which a setting counts as faster."""
GENERATORS = {"local eager": "local", "local graphs": "local", "vllm": "vllm", "sglang": "sglang"}
"""Value of `generator` by the name of the case that measures it."""
STEP = 0.05
"""Step of the recommended share of a GPU."""
RATE = "tokens_per_second"

Figures = Mapping[str, Mapping[str, Any]]
"""Figures of the cases that passed, by the name of the case."""


@dataclass(frozen=True)
class RecommendedSetting:
    """A recommended setting of a run."""

    key: str
    value: str
    reason: str


def recommend(outcomes: Mapping[str, CaseResult], gpu_memory: int) -> list[RecommendedSetting]:
    """Return the settings that follow from the cases that passed. A setting whose cases did not run is left out.

    Args:
        gpu_memory: memory of a GPU, in bytes; 0 without one.
    """
    figures = {name: outcome.figures for name, outcome in outcomes.items() if outcome.passed}
    return [
        *_param_dtype(figures),
        *_variant(figures, "update compiled", "trainer.compile", "true", "false"),
        *_attention(figures),
        *_micro_batch(figures),
        *_generator(figures),
        *_gpu_memory(figures, gpu_memory),
    ]


def _param_dtype(figures: Figures) -> Iterator[RecommendedSetting]:
    if not figures.keys() >= {"update float32", "update bfloat16", "gradients"}:
        return
    ratio = figures["update bfloat16"][RATE] / figures["update float32"][RATE]
    dtype = "bfloat16" if ratio > FASTER else "float32"
    reason = f"bfloat16 trains {ratio:.2f} x the tokens/s of float32"
    yield RecommendedSetting("trainer.fsdp.param_dtype", dtype, reason)


def _variant(figures: Figures, name: str, key: str, chosen: str, other: str) -> Iterator[RecommendedSetting]:
    """Yield the value of a key that a variant of the update in bfloat16 measures."""
    if figures.keys() >= {"update bfloat16", name}:
        ratio = figures[name][RATE] / figures["update bfloat16"][RATE]
        reason = f"{chosen} trains {ratio:.2f} x the tokens/s of {other}"
        yield RecommendedSetting(key, chosen if ratio > FASTER else other, reason)


def _attention(figures: Figures) -> Iterator[RecommendedSetting]:
    chosen = figures.get("update flash", {}).get("attn_implementation", "")
    yield from _variant(figures, "update flash", "model.attn_implementation", chosen, "sdpa")


def _micro_batch(figures: Figures) -> Iterator[RecommendedSetting]:
    if found := figures.get("micro-batches"):
        tokens, rates = found["tokens"], found["by_tokens"]
        reason = f"{rates[str(tokens)][RATE]:,.0f} tokens/s; larger ones are not faster"
        if str(tokens) == list(rates)[-1]:
            reason = f"{rates[str(tokens)][RATE]:,.0f} tokens/s; larger ones were not measured"
        yield RecommendedSetting("trainer.max_tokens_per_microbatch", str(tokens), reason)


def _generator(figures: Figures) -> Iterator[RecommendedSetting]:
    rates = {name: figures[name][RATE] for name in GENERATORS if name in figures}
    if rates:
        name, rate = max(rates.items(), key=lambda item: item[1])
        others = "the fastest here" if len(rates) > 1 else "no other engine was measured"
        yield RecommendedSetting("generator", GENERATORS[name], f"{rate:,.0f} tokens/s; {others}")


def _gpu_memory(figures: Figures, gpu_memory: int) -> Iterator[RecommendedSetting]:
    """Yield the share of a server that sleeps during updates: what the trainer leaves while it does not train."""
    slept = [name for name in ("vllm sleep", "sglang sleep") if name in figures]
    held = figures.get("update bfloat16", {}).get("held_bytes")
    if not (slept and held and gpu_memory):
        return
    free = (1 - SLACK) - (held + 2 * PROCESS) / gpu_memory
    if (share := math.floor(free / STEP + 1e-9) * STEP) >= STEP:
        reason = f"for colocate=true: the trainer of this model holds {held / 2**30:.1f} GiB between updates"
        yield RecommendedSetting("generator.gpu_memory_utilization", f"{share:.2f}", reason)
