"""Rule 5: the reward rose and has stopped rising, while all other metrics are healthy."""

from __future__ import annotations

import re

from mtrl.diagnose.finding import Finding, Proposal, Severity
from mtrl.diagnose.record import Record
from mtrl.diagnose.registry import rule
from mtrl.diagnose.rules.equal_groups import NEAR
from mtrl.diagnose.rules.hacked import hacked_reward
from mtrl.diagnose.stats import Change, halves
from mtrl.diagnose.views import (
    EQUAL,
    HELD_OUT,
    REWARD,
    evaluations,
    from_to,
    is_flat,
    is_solved,
    known,
    level,
    lr_share,
    over_the_run,
    propose,
    span,
)  # fmt: skip
from mtrl.utils.text import percent, short

TOLERANCE = 0.06
"""Smallest rise that counts, as a share of the reward of a success, within a window or more."""
LEAST = 25
"""Minimum number of steps of a stall (R155)."""
LADDERS = (
    ("Qwen/Qwen2.5-{}-Instruct", ("0.5B", "1.5B", "3B", "7B", "14B", "32B")),
    ("Qwen/Qwen2.5-{}", ("0.5B", "1.5B", "3B", "7B", "14B", "32B")),
    ("Qwen/Qwen3-{}", ("0.6B", "1.7B", "4B", "8B", "14B", "32B")),
    ("meta-llama/Llama-3.2-{}-Instruct", ("1B", "3B")),
)
"""Model families by size. For full fine-tuning, the next larger model corresponds to a higher rank for LoRA."""


@rule("R152", windows=2.0)
def stall(record: Record) -> Finding | None:
    """The reward has stopped rising below success while all other metrics are normal: more capacity."""
    since, change = over_the_run(record, REWARD), _plateau(record)
    if since is None or change is None or since.at_least() <= TOLERANCE * record.unit:
        return None  # it never rose, which another rule reports
    if is_solved(record) or not _is_healthy(record):
        return None
    if hacked_reward(record) is not None:
        return None  # the reward does not mean success here
    held_out = record.series(HELD_OUT).values
    if len(held_out) >= 3 and held_out[-1] - held_out[-3] > 0.05:
        return None  # held-out success still improves
    steps = max(LEAST, 2 * record.window)
    return Finding(
        severity=Severity.WARNING,
        title=f"The reward has stayed at {short(change.after)} for {steps} steps, and all other metrics are normal",
        evidence=known(
            from_to("between the halves of the plateau the mean reward", change),
            from_to("since the first steps it", since),
            evaluations(record, HELD_OUT, "held-out success"),
            f"{percent(level(record, EQUAL))} of the groups have no advantage, entropy is "
            f"{short(level(record, 'train/entropy'))}, the gradient {short(level(record, 'train/grad_norm'))}",
        ),
        metrics=(REWARD, HELD_OUT, EQUAL, "train/entropy", "train/grad_norm"),
        steps=span(record.series(REWARD).last(2 * record.window)),
        proposals=tuple(_proposals(record)),
        advice=_advice(record),
        expect="the reward rises above its plateau within 50 steps",
    )


def _plateau(record: Record) -> Change | None:
    """Return the change between the halves of the last two to four windows if they are equal, measured with enough
    precision; else None."""
    values = record.series(REWARD).values
    for windows in (2, 3, 4):
        last = values[-windows * record.window :]
        if LEAST <= len(last) == windows * record.window and is_flat(found := halves(last), TOLERANCE * record.unit):
            return found
    return None


def _is_healthy(record: Record) -> bool:
    entropy = record.series("train/entropy").values
    collapsed = len(entropy) > 10 and level(record, "train/entropy") < 0.1 * float(entropy[:5].mean())
    return (
        (level(record, EQUAL) < 0.75 or level(record, REWARD) >= NEAR * record.unit)
        and lr_share(record) >= 0.3
        and level(record, "train/grad_norm", 1.0) > 0
        and level(record, "train/clip_frac") < 0.3
        and level(record, "analysis/logprob_drift/mean") < 0.05
        and not collapsed
    )


def _advice(record: Record) -> str:
    if int(record.setting("model.lora_rank")):
        return "With adapters the capacity is their rank, up to that of the matrices beside them."
    return "With full fine-tuning the capacity is that of the model."


def _proposals(record: Record) -> list[Proposal]:
    rank, tiny = int(record.setting("model.lora_rank")), record.setting("model.name") == "tiny"
    found = []
    if rank and not (tiny and max(64, 2 * rank) > int(record.setting("model.tiny.hidden_size"))):
        found.append(_doubled(rank, int(record.setting("model.lora_alpha"))))
    elif tiny:
        found.append(_larger(record))
    elif (larger := larger_model(str(record.setting("model.path")))) is not None:
        found.append(propose("the next larger model of its family", model__path=larger))
    lr = float(record.setting("trainer.optimizer.lr"))
    found.append(propose("twice the learning rate, if nothing else helps", trainer__optimizer__lr=2 * lr))
    prompts = int(record.setting("trainer.prompts_per_step"))
    found.append(propose("a gradient with less noise", trainer__prompts_per_step=2 * prompts))
    return found


def _doubled(rank: int, alpha: int) -> Proposal:
    """Propose a higher rank: small adapters go to rank 64 with alpha 128 (R018); larger ones double both, so that the
    scale alpha / rank stays."""
    larger = max(64, 2 * rank)
    return propose("twice the capacity of the adapter" if larger == 2 * rank else "more capacity of the adapter",
                   model__lora_rank=larger, model__lora_alpha=max(2 * alpha, 128 if larger == 64 else 0))  # fmt: skip


def _larger(record: Record) -> Proposal:
    """Propose twice the width and the depth, as in the next larger model of a family, because width cannot replace
    depth in some tasks."""
    return propose("twice the width and the depth of the policy, which starts from new weights",
                   model__tiny__hidden_size=2 * int(record.setting("model.tiny.hidden_size")),
                   model__tiny__intermediate_size=2 * int(record.setting("model.tiny.intermediate_size")),
                   model__tiny__layers=2 * int(record.setting("model.tiny.layers")))  # fmt: skip


def larger_model(path: str) -> str | None:
    """Return the next larger model of a family in `LADDERS`; None if there is none."""
    for template, sizes in LADDERS:
        before, after = template.split("{}")
        found = re.fullmatch(re.escape(before) + r"([\d.]+B)" + re.escape(after), path)
        if found and found[1] in sizes[:-1]:
            return template.format(sizes[sizes.index(found[1]) + 1])
    return None
