"""Rule 1: the reward has not moved since the beginning."""

from __future__ import annotations

from mtrl.diagnose.command import shipped
from mtrl.diagnose.finding import Finding, Proposal, Severity
from mtrl.diagnose.record import Record
from mtrl.diagnose.registry import rule
from mtrl.diagnose.stats import halves
from mtrl.diagnose.views import (
    EQUAL,
    HELD_OUT,
    REWARD,
    SUCCESS,
    evaluations,
    from_to,
    is_flat,
    is_solved,
    known,
    level,
    other_schemes,
    over_the_run,
    propose,
    rescoring,
    span,
)  # fmt: skip
from mtrl.utils.text import percent, short

TOLERANCE = 0.05
"""Smallest change that counts, as a share of the reward of a success."""
FLOOR = 0.01
"""Largest mean reward that counts as none, as a share of the reward of a success."""
LEAST = 10
"""Minimum number of steps without any reward before this is reported."""


@rule("R148", windows=0.4)
def flat_from_start(record: Record) -> Finding | None:
    """The reward has not changed since step 0: compare the responses with what the reward parses."""
    reward = record.series(REWARD)
    means = reward.values.mean(), reward.values[:3].mean() / 3
    no_reward = record.steps >= LEAST and bool(max(means) <= FLOOR * record.unit)
    change = over_the_run(record, REWARD)
    if is_solved(record) or change is None or not (no_reward or _is_flat(record)):
        return None
    if not no_reward and level(record, EQUAL) >= 0.8:
        return None  # the groups have equal rewards, which the next rule reports
    late = record.steps >= 2 * record.window
    severity = Severity.ALARM if no_reward else Severity.WARNING if late else Severity.NOTE
    held_back, schemes = [] if no_reward else _held_back(record), other_schemes(record)
    shown = level(record, SUCCESS)
    blind = shown > 0.05 and shown * record.unit > 2 * level(record, REWARD)
    return Finding(
        severity=severity,
        title=f"The reward has stayed at {short(change.after)} since step {int(reward.steps[0])}",
        evidence=known(
            from_to(f"the mean reward of {len(reward)} steps", change),
            f"the scorer counts {percent(shown)} of the same rollouts as a success, and the reward does not"
            if blind
            else f"the scorer counts {percent(shown)} of the rollouts as a success"
            if record.has(SUCCESS)
            else None,
            evaluations(record, HELD_OUT, "held-out success"),
            *_parts(record),
        ),
        metrics=(REWARD, SUCCESS, "rollout/completion/mean", EQUAL),
        steps=span(reward),
        proposals=(
            *held_back,
            *(propose(f"another reward of this task ({scheme}); rescore the stored trajectories with it first",
                      reward__scheme=scheme) for scheme in schemes),
        ),
        advice="Rollouts of a prompt have different rewards, so there is a gradient, and the policy does not follow it."
        if held_back
        else "Compare the end of some responses with what the reward parses: tag, field names, format. The one-shot "
        "example of the prompt has to match it as well. If the formats agree, the task is too hard for this model: "
        "reward progress, or begin with easier rows.",
        expect="once the reward parses the responses, it differs between rollouts: "
        f"{EQUAL} falls within a few steps, and the mean reward rises within 25 to 50",
        look=(f"mtrl view {record.path or 'RUN'}", *rescoring(record, schemes)),
    )  # fmt: skip


def _is_flat(record: Record) -> bool:
    """Whether the reward is flat over the whole run, measured with enough precision. A short flat start is common, so
    a run with some reward gets a whole window."""
    values = record.series(REWARD).values
    if len(values) < record.window:
        return False
    tolerance = TOLERANCE * record.unit
    return is_flat(over_the_run(record, REWARD), tolerance) and is_flat(halves(values), tolerance)


def _held_back(record: Record) -> list[Proposal]:
    """Propose to remove terms that pull the policy back, and to take larger steps. They apply if groups differ, so
    there is a gradient that the policy does not follow."""
    if level(record, EQUAL) >= 0.5:
        return []
    found = [
        propose("no penalty that holds the policy back", **{f"algorithm__{term}": 0.0})
        for term in ("kl_loss_coef", "kl_reward_coef", "entropy_coef")
        if record.setting(f"algorithm.{term}")
    ]
    rate, usual = float(record.setting("trainer.optimizer.lr")), shipped(record.config, "trainer.optimizer.lr")
    if usual is not None and usual >= 10 * rate:
        found.append(propose("the learning rate of the experiment", trainer__optimizer__lr=float(usual)))
    else:
        found.append(propose("a learning rate ten times as large", trainer__optimizer__lr=10 * rate))
    return found


def _parts(record: Record) -> list[str]:
    """Describe the reward components that were always 0, and the metrics of the answers' form."""
    silent = [
        key.removeprefix("rollout/components/")
        for key in record.metrics("rollout/components/")
        if not record.series(key).values.any()
    ]
    sentences = [f"components that were 0 in every step: {', '.join(silent)}"] if silent else []
    for key in ("rollout/metrics/malformed", "rollout/completion/mean"):
        if record.has(key):
            sentences.append(f"{key} is {short(level(record, key))}")
    return sentences
