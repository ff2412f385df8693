"""Rules for the gradient: spikes, and tokens that the loss clips."""

from __future__ import annotations

import numpy as np

from mtrl.diagnose.finding import Finding, Severity
from mtrl.diagnose.record import Record
from mtrl.diagnose.registry import rule
from mtrl.diagnose.views import REWARD, known, propose, recent
from mtrl.utils.text import percent, short

NORM, CLIPPED = "train/grad_norm", "train/clip_frac"
SPIKE = 10.0
"""Multiple of the median gradient norm above which a step is a spike."""


@rule("R153", windows=0.8)
def gradient_spikes(record: Record) -> Finding | None:
    """Single steps have a gradient many times the usual one, and no limit clips it."""
    series = record.series(NORM)
    last = series.last(2 * record.window)
    if len(last) < 10:
        return None
    usual = float(np.median(series.values))
    limit = float(record.setting("trainer.optimizer.max_grad_norm"))
    high = last.values > SPIKE * usual
    passed = usual > 0 and min(float(last.values.max()), limit) > SPIKE / 2 * usual
    if not high.any() or not passed:
        return None  # gradient clipping removes the spikes
    steps = [int(step) for step in last.steps[high]]
    return Finding(
        severity=Severity.WARNING if len(steps) >= 3 else Severity.NOTE,
        title=f"The gradient norm spikes to {short(float(last.values.max()))}, {SPIKE:.0f} times the usual "
        f"{short(usual)} and more, in {len(steps)} of {len(last)} steps",
        evidence=(f"at steps {', '.join(map(str, steps[-8:]))}; trainer.optimizer.max_grad_norm={short(limit)}",),
        metrics=(NORM, REWARD),
        steps=(int(last.steps[0]), int(last.steps[-1])),
        proposals=(
            propose(
                "a limit near the usual gradient norm", trainer__optimizer__max_grad_norm=float(f"{3 * usual:.1g}")
            ),
            propose("half the learning rate", trainer__optimizer__lr=float(record.setting("trainer.optimizer.lr")) / 2),
        ),
        expect="spikes are still measured, and the limit clips them",
    )


@rule("R008", windows=0.6)
def clipped_tokens(record: Record) -> Finding | None:
    """So many tokens are clipped that the update has moved too far from the policy that sampled them."""
    share = recent(record, CLIPPED)
    if share is None or share.value - 2 * share.error < 0.3:
        return None
    parts, epochs = int(record.setting("trainer.mini_batches")), int(record.setting("trainer.update_epochs"))
    return Finding(
        severity=Severity.WARNING,
        title=f"{percent(share.value)} of the trained tokens are clipped",
        evidence=known(
            f"trainer.mini_batches={parts}, trainer.update_epochs={epochs}: {parts * epochs} updates of one batch",
        ),
        metrics=(CLIPPED, REWARD),
        proposals=(
            propose("fewer updates of one batch", trainer__update_epochs=1, trainer__mini_batches=1),
            propose("strictly on-policy", async_config__max_steps_off_policy=0),
            propose("half the learning rate", trainer__optimizer__lr=float(record.setting("trainer.optimizer.lr")) / 2),
        ),
        expect="train/clip_frac below 0.2 within a few steps",
    )
