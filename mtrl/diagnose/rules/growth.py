"""Rules for growth: of the context of an episode, of the memory, and of the duration of a step."""

from __future__ import annotations

import math

import numpy as np

from mtrl.config.derived import SEQUENCES
from mtrl.diagnose.finding import Finding, Proposal, Severity
from mtrl.diagnose.record import Record
from mtrl.diagnose.registry import rule
from mtrl.diagnose.views import (
    MAX_TURNS,
    from_to,
    known,
    level,
    over_the_run,
    propose,
    propose_each,
    recent,
    success,
    values_of,
)
from mtrl.utils.text import duration, percent, short

CONTEXT, LIMIT = "rollout/context/mean", "rollout/stop/context_limit"
MEMORY, GPU = "perf/memory_bytes", "perf/gpu_memory_bytes"
"""Metrics with the peak memory so far, in bytes. They never fall, and a leak raises them in nearly every step."""
STEP, SPEED = "time/step", "perf/tokens_per_second"
RISING = 0.5
"""Minimum share of the last steps that raised the peak memory."""
MIB = 2**20


@rule("R143", windows=1.0)
def context_growth(record: Record) -> Finding | None:
    """The context of episodes grows and success does not rise, or episodes reach the context limit."""
    full, grown = recent(record, LIMIT), over_the_run(record, CONTEXT)
    hits = full is not None and full.value - 2 * full.error > 0.02
    learns = over_the_run(record, success(record))
    longer = (
        grown is not None
        and grown.before > 0
        and grown.at_least() > 0.4 * grown.before
        and (learns is None or learns.at_least(2.0) <= 0)
    )
    if not hits and not longer:
        return None
    limit = record.setting("generator.max_context_length")
    if hits:
        title = f"{percent(level(record, LIMIT))} of the episodes end because their context is full"
    else:
        assert grown is not None
        title = f"The context of an episode has grown from {short(grown.before)} to {short(grown.after)} tokens, "
        title += "and success has not risen"
    fewer = propose_each("fewer turns", values_of(record, MAX_TURNS), lambda turns: max(1, math.floor(0.75 * turns)))
    return Finding(
        severity=Severity.WARNING,
        title=title,
        evidence=known(
            from_to("tokens of a conversation at its end", grown) if grown else None,
            from_to("turns", made) if (made := over_the_run(record, "rollout/turns/mean")) else None,
            from_to("success", learns) if learns else None,
        ),
        metrics=(CONTEXT, "rollout/context/max", LIMIT, "rollout/turns/mean"),
        proposals=(
            *((propose("a longer context", generator__max_context_length=2 * int(limit)),) if limit and hits else ()),
            fewer,
        ),
        advice="Shorten old observations in the environment: unneeded text costs tokens in every turn.",
        expect="rollout/context/mean falls at once, with the same success",
    )


@rule("R165", "R166", windows=2.0)
def memory_growth(record: Record) -> Finding | None:
    """Memory grows from step to step."""
    key = GPU if record.has(GPU) else MEMORY
    grown, late = over_the_run(record, key), record.series(key).last(record.window).values
    if grown is None or grown.difference < max(0.3 * grown.before, 256 * MIB):
        return None
    if float((np.diff(late) > 0).mean()) < RISING:
        return None  # the memory jumped once and then stayed: longer episodes or a larger batch
    return Finding(
        severity=Severity.WARNING,
        title=f"Memory grew from {short(grown.before / MIB)} to {short(grown.after / MIB)} MiB and still grows",
        evidence=known(
            f"by {short(float(late[-1] - late[0]) / MIB / (len(late) - 1))} MiB a step in the last {len(late)} steps",
            from_to("tokens of a conversation at its end", made) if (made := over_the_run(record, CONTEXT)) else None,
        ),
        metrics=(key, CONTEXT),
        proposals=_less_memory(record),
        expect=f"{key} stays level within 25 steps",
    )


def _less_memory(record: Record) -> tuple[Proposal, ...]:
    found = []
    if record.setting("generator.backend") != "local":
        found.append(
            propose("headroom for the cache of long conversations", generator__gpu_memory_utilization=0.7,
                    generator__max_num_seqs=256)
        )  # fmt: skip
    sequences = int(record.setting("generator.max_num_seqs") or SEQUENCES)
    found.append(propose("fewer concurrent conversations", generator__max_num_seqs=max(1, min(256, sequences // 2))))
    tokens = int(record.setting("trainer.max_tokens_per_microbatch"))
    found.append(propose("smaller micro-batches", trainer__max_tokens_per_microbatch=max(256, tokens // 2)))
    found.append(propose("recompute activations instead of storing them", trainer__gradient_checkpointing=True))
    return tuple(found)


@rule("R133", windows=1.0)
def slow_steps(record: Record) -> Finding | None:
    """Steps take several times as long as at the beginning."""
    seconds, rates = record.series(STEP).values, record.series(SPEED).values
    if len(seconds) < 15:
        return None
    width = min(record.window, len(seconds) // 3)
    before, now = float(np.median(seconds[:width])), float(np.median(seconds[-width:]))
    if before <= 0 or now < 2.5 * before:
        return None
    tokens = over_the_run(record, "rollout/tokens/trajectory_mean")
    slower = len(rates) >= 2 * width and float(np.median(rates[-width:])) < 0.6 * float(np.median(rates[:width]))
    return Finding(
        severity=Severity.NOTE,
        title=f"A step takes {duration(now)}; at the beginning it took {duration(before)}",
        evidence=known(
            from_to("tokens of an episode", tokens) if tokens else None,
            f"tokens per second fell from {short(float(np.median(rates[:width])))} to "
            f"{short(float(np.median(rates[-width:])))}: the machine is slower, or shared"
            if slower
            else "the tokens per second are as before: episodes have become longer",
        ),
        metrics=(STEP, SPEED, "rollout/tokens/trajectory_mean"),
        advice="Compare time/generate with time/update, and read timeline.jsonl for the phases of a step. Other "
        "programs on the machine slow it down as well.",
        expect="seconds per token as at the beginning",
    )
