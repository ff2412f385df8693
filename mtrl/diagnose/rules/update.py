"""Rules for the update: whether it changes the policy at all, and whether it ended too early."""

from __future__ import annotations

from mtrl.diagnose.finding import Finding, Severity
from mtrl.diagnose.record import Record
from mtrl.diagnose.registry import rule
from mtrl.diagnose.views import REWARD, between_last, from_to, is_solved, level, lr_share, propose
from mtrl.utils.text import short

SILENT = 5
"""Number of consecutive steps without any update."""


@rule("R154", windows=0.2)
def nothing_learnt(record: Record) -> Finding | None:
    """Groups have advantages and the weights do not change: the learning rate or the gradient is 0."""
    rates, gradients = record.series("train/lr").last(SILENT), record.series("train/grad_norm").last(SILENT)
    warm_up = int(record.setting("trainer.optimizer.warmup_steps"))
    if record.step <= warm_up + SILENT or level(record, "analysis/informative_groups", 1.0, SILENT) <= 0:
        return None
    no_rate = len(rates) == SILENT and not rates.values.any()
    no_gradient = len(gradients) == SILENT and not gradients.values.any()
    if not (no_rate or no_gradient) or (record.is_over and not no_gradient and lr_share(record) < 0.5):
        return None
    lr = float(record.setting("trainer.optimizer.lr"))
    proposals = (
        propose("a learning rate that does not end at 0", trainer__optimizer__min_lr_ratio=0.1),
        propose("a constant learning rate", trainer__optimizer__schedule="constant"),
    )
    return Finding(
        severity=Severity.ALARM,
        title=f"The {'learning rate' if no_rate else 'gradient'} has been 0 for {SILENT} steps, and nothing is learnt",
        evidence=(
            f"trainer.optimizer.lr={short(lr)}, schedule {record.setting('trainer.optimizer.schedule')}, "
            f"max_steps {record.setting('trainer.max_steps')}",
            f"{short(level(record, 'analysis/informative_groups', 0.0, SILENT))} groups per step have an advantage",
        ),
        metrics=("train/lr", "train/grad_norm"),
        proposals=proposals if no_rate else (propose("a larger learning rate", trainer__optimizer__lr=10 * lr),),
        advice="" if no_rate else "A gradient of exactly 0 means that every token is masked or clipped: look at "
        "train/clip_frac and analysis/untrained_frac.",
        expect="train/grad_norm and train/lr above 0 from the first step",
    )  # fmt: skip


@rule("R155", windows=2.0)
def ended_schedule(record: Record) -> Finding | None:
    """The learning rate ended while the reward was still rising: the run was too short."""
    rise = between_last(record, REWARD)
    if not record.is_over or is_solved(record) or rise is None or rise.at_least(2.0) < 0.02 * record.unit:
        return None
    steps = int(record.setting("trainer.max_steps"))
    rates = record.series("train/lr").last(5).values
    ended = len(rates) > 0 and record.setting("trainer.optimizer.schedule") != "constant"
    return Finding(
        severity=Severity.NOTE,
        title=f"The reward was still rising when the run ended at step {steps}",
        evidence=(
            from_to("the mean reward of the last two windows", rise),
            *((f"the learning rate ended at {short(float(rates[-1]))}",) if ended else ()),
        ),
        metrics=(REWARD, "train/lr"),
        proposals=(propose("twice as many steps", trainer__max_steps=2 * steps),),
        expect="the reward continues to rise at the same rate",
    )
