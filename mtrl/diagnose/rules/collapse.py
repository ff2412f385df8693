"""Rule 4: a reward falls towards zero after it was higher."""

from __future__ import annotations

import numpy as np

from mtrl.diagnose.finding import Finding, Proposal, Severity
from mtrl.diagnose.record import Record
from mtrl.diagnose.registry import rule
from mtrl.diagnose.rules.drop import COLLAPSED, find_drop
from mtrl.diagnose.views import EQUAL, HELD_OUT, REWARD, evaluations, known, propose
from mtrl.utils.text import short

DRIFT = "analysis/logprob_drift/mean"
MUCH_DRIFT = 0.01
"""Drift in nats per token. Below it, the drift is rounding from another order of sums, which grows with entropy."""
WATCHED = {
    "train/entropy": "entropy",
    "train/grad_norm": "gradient norm",
    "train/clip_frac": "share of clipped tokens",
    DRIFT: "drift of log-probs between engine and trainer",
    "analysis/staleness/mean": "staleness in updates",
    "rollout/tokens/response_mean": "tokens of a response",
    "rollout/turns/mean": "turns",
    EQUAL: "share of groups without an advantage",
}


@rule("R151", "R153", windows=0.4)
def collapse(record: Record) -> Finding | None:
    """The reward falls suddenly towards zero."""
    drop = find_drop(record)
    if drop is None:
        return None
    collapsed = drop.left <= COLLAPSED
    stale = int(record.setting("async_config.max_steps_off_policy"))
    moved = _moved(record, drop.step)
    return Finding(
        severity=Severity.ALARM if collapsed else Severity.WARNING,
        title=f"The reward {'collapsed' if collapsed else 'is falling'} from {short(drop.peak)} to {short(drop.now)} "
        f"at step {drop.step}",
        evidence=known(
            f"the mean of {'the first steps' if drop.at_start else 'five steps'} was {short(drop.peak)}"
            f"{'' if drop.at_start else ' at best'}; since step {drop.step} it is {short(drop.now)}",
            f"tokens may be {stale} updates old (async_config.max_steps_off_policy={stale})" if stale else None,
            *(f"{WATCHED[key]} went from {short(a)} to {short(b)} around that step" for key, (a, b) in moved.items()),
            evaluations(record, HELD_OUT, "held-out success"),
        ),
        metrics=(REWARD, *moved, *(key for key in ("train/entropy", "train/grad_norm") if key not in moved)),
        steps=(max(1, drop.step - record.window), record.step),
        proposals=tuple(_proposals(record, moved, drop.at_start)),
        advice="Continue from a checkpoint before the fall, not from the last one.",
        expect="the reward stays at its level before the fall, or a little lower, for 25 to 50 steps",
    )


def _moved(record: Record, step: int) -> dict[str, tuple[float, float]]:
    """Return the other metrics that changed clearly at `step`: their means in ten steps before and in the last ten
    steps since (for the gradient norm, the maximum of the latter)."""
    found: dict[str, tuple[float, float]] = {}
    for key in WATCHED:
        series = record.series(key)
        before, after = series.until(step - 3).last(10).values, series.since(step - 2).last(10).values
        if len(before) < 3 or len(after) < 2:
            continue
        pick = np.max if key == "train/grad_norm" else np.mean
        a, b = float(np.mean(before)), float(pick(after))
        if abs(b - a) > max(4 * float(before.std()), 0.5 * abs(a), 1e-9):
            found[key] = a, b
    return found


def _rose(moved: dict[str, tuple[float, float]], key: str) -> bool:
    return key in moved and moved[key][1] > moved[key][0]


def _proposals(record: Record, moved: dict[str, tuple[float, float]], at_start: bool) -> list[Proposal]:
    """Propose in this order: no stale tokens, a safe loss, remedies for the changed metrics, smaller steps. If the
    first updates caused the fall, their size is the cause, because tokens were fresh and ratios near 1."""
    loss = record.setting("algorithm.loss_fn")
    lr = float(record.setting("trainer.optimizer.lr"))
    low, high = record.setting("algorithm.clip_low_threshold"), record.setting("algorithm.clip_high_threshold")
    safe = propose("the bounded loss with its safe thresholds", algorithm__loss_fn="ppo",
                   algorithm__clip_low_threshold=0.8, algorithm__clip_high_threshold=1.2)  # fmt: skip
    found = [propose("a tenth of the learning rate", trainer__optimizer__lr=lr / 10)] if at_start else []
    if _rose(moved, "train/entropy") and float(record.setting("algorithm.entropy_coef")) > 0:
        found.append(propose("no reward for entropy", algorithm__entropy_coef=0.0))
    found.append(propose("train only on tokens of the newest weights", async_config__max_steps_off_policy=0))
    if loss not in ("ppo", "regular") or (low, high) != (0.8, 1.2):
        found.append(safe)
    if _rose(moved, DRIFT) and moved[DRIFT][1] >= MUCH_DRIFT:
        found.append(propose("correct the difference between engine and trainer", algorithm__loss_anchor="old",
                             algorithm__off_policy_correction="tis"))  # fmt: skip
    found.append(propose("one update per batch", trainer__mini_batches=1, trainer__update_epochs=1))
    found.append(propose("half the learning rate", trainer__optimizer__lr=lr / 2))
    if not (record.setting("algorithm.kl_loss_coef") or record.setting("algorithm.kl_reward_coef")):
        found.append(propose("a penalty for leaving the first policy", algorithm__kl_loss_coef=0.01))
    limit = float(record.setting("trainer.optimizer.max_grad_norm"))
    found.append(propose("half the limit of the gradient norm", trainer__optimizer__max_grad_norm=limit / 2))
    return found
