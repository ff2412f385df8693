"""The policy learns training rows and not held-out rows: it memorises rows, or held-out rows are of another kind."""

from __future__ import annotations

from mtrl.diagnose.command import shipped
from mtrl.diagnose.finding import Finding, Proposal, Severity
from mtrl.diagnose.gap import Gap, find_gap
from mtrl.diagnose.record import Record
from mtrl.diagnose.registry import rule
from mtrl.diagnose.views import HELD_OUT, SUCCESS, evaluations, from_to, known, level, propose
from mtrl.utils.text import percent, short

WIDE = 0.3
"""Minimum gap for an alarm, as a share of the rollouts."""
OFTEN = 3.0
"""Number of epochs after which rows count as repeated."""


@rule("R135", "R155", windows=1.0)
def held_out_gap(record: Record) -> Finding | None:
    """Training success rises and held-out success does not follow, or held-out success falls and training does not."""
    gap = find_gap(record)
    if gap is None or not gap.scored:
        return None  # a reward without scores may not mean success; `hacked_reward` handles it
    wide = gap.trained.after - gap.held_out >= WIDE
    epochs = level(record, "train/epoch", steps=3)
    return Finding(
        severity=Severity.ALARM if wide or gap.falls else Severity.WARNING,
        title=f"Training rows are solved in {percent(gap.trained.after)} of the rollouts, held-out rows in "
        f"{percent(gap.held_out)}",
        evidence=known(
            from_to("success on training rows, by the scorer,", gap.trained),
            evaluations(record, HELD_OUT, "held-out success"),
            f"held-out success was best at step {gap.best_step} ({short(gap.best)})" if gap.falls else None,
            f"every training row was drawn {short(epochs)} times" if epochs >= OFTEN else None,
        ),
        metrics=(SUCCESS, HELD_OUT, "train/epoch"),
        proposals=tuple(_proposals(record, gap, epochs)),
        advice=_advice(gap, epochs),
        expect="held-out success rises with success on training rows, within 50 steps",
        look=(f"mtrl view {record.path or 'RUN'}",),
    )


def _proposals(record: Record, gap: Gap, epochs: float) -> list[Proposal]:
    found = []
    if epochs >= OFTEN and record.setting("data.max_train_rows") is not None:
        found.append(propose("all training rows", data__max_train_rows="null"))
    if epochs >= OFTEN and record.setting("data.path") is None:
        rows = int(record.setting("data.synthetic_train_rows"))
        usual = int(shipped(record.config, "data.synthetic_train_rows") or 0)
        found.append(
            propose("more rows, each of which is drawn less often", data__synthetic_train_rows=max(usual, 8 * rows))
        )
    if gap.falls and gap.best_step > 0:
        found.append(propose("an end at the step with the best held-out success", trainer__max_steps=gap.best_step))
    if not (record.setting("algorithm.kl_loss_coef") or record.setting("algorithm.kl_reward_coef")):
        found.append(propose("a penalty for leaving the first policy", algorithm__kl_loss_coef=0.01))
    return found


def _advice(gap: Gap, epochs: float) -> str:
    why = (
        "More rows help most, because a policy memorises rows that are repeated."
        if epochs >= OFTEN
        else "The rows are hardly repeated, so held-out rows are of another kind: compare solved rows of both."
    )
    best = f" Use the checkpoint of step {gap.best_step}, or the nearest one, instead of the last." if gap.falls else ""
    return f"{why}{best} With diagnosis.live=stop such a run ends by itself."
