"""Rule for speed: a step takes much longer than at the beginning."""

from __future__ import annotations

import numpy as np

from mtrl.diagnose.finding import Finding, Severity
from mtrl.diagnose.record import Record
from mtrl.diagnose.registry import rule
from mtrl.diagnose.rules.views import from_to, known, over_the_run
from mtrl.utils.text import duration, short

STEP, SPEED = "time/step", "perf/tokens_per_second"


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
            else "the speed per token is as before: episodes have become longer",
        ),
        metrics=(STEP, SPEED, "rollout/tokens/trajectory_mean"),
        advice="time/generate and time/update tell which half it is, and timeline.jsonl where the seconds go; other "
        "programs on the machine count as well.",
        expect="seconds per token as at the beginning",
    )
