"""Rule for competing tasks: several tasks are trained at once, and the reward fluctuates."""

from __future__ import annotations

import math
from typing import Any

from mtrl.diagnose.finding import Finding, Severity
from mtrl.diagnose.record import Record
from mtrl.diagnose.registry import rule
from mtrl.diagnose.stats import wobble
from mtrl.diagnose.views import HELD_OUT, REWARD, between_last, evaluations, from_to, is_solved, known, level
from mtrl.utils.text import short

NAMES = ("domain", "domains", "game", "games", "task", "tasks")
"""Keys of `environment.config` that choose the tasks of a family."""
SAMPLING_NOISE = 1.3
"""Multiple of the noise from drawing prompts above which the fluctuation counts."""


@rule("R156", windows=2.0)
def competing_tasks(record: Record) -> Finding | None:
    """Several tasks are trained at once and the reward fluctuates without rising: train one task first."""
    key = _choice(record)
    rise = between_last(record, REWARD)
    if key is None or rise is None or is_solved(record) or rise.at_least(2.0) > 0:
        return None
    share = min(max(level(record, REWARD) / record.unit, 0.05), 0.95)
    prompts = int(record.setting("trainer.prompts_per_step"))
    noise = record.unit * math.sqrt(share * (1 - share) / prompts)
    swing = wobble(record.series(REWARD).last(2 * record.window).values)
    if swing < SAMPLING_NOISE * noise:
        return None
    return Finding(
        severity=Severity.WARNING,
        title=f"Several tasks are trained at once, and the reward fluctuates by ±{short(swing)} without rising",
        evidence=known(
            f"the choice of {prompts} prompts per step explains at most ±{short(noise)}",
            from_to("the mean reward of the last two windows", rise),
            evaluations(record, HELD_OUT, "held-out success"),
        ),
        metrics=(REWARD, HELD_OUT),
        advice=f"Train one task first: set environment.config.{key} to one of them.",
        expect="a smoother curve that rises within 25 to 50 steps",
    )


def _choice(record: Record) -> str | None:
    """Return the key that could choose a single task but chooses several; None if there is none."""
    from mtrl.environments.family import get_family

    config: dict[str, Any] = record.setting("environment.config") or {}
    try:
        takes = get_family(record.setting("environment.name"), record.setting("environment.target")).config_keys
    except Exception:  # the task may not be installed here
        takes = ()
    for name in NAMES:
        value = config.get(name)
        if name in (*takes, *config) and (value in (None, "all") or (isinstance(value, list) and len(value) > 1)):
            return name
    return None
