"""Rules for the learning signal of the groups: collapsing variance, a flat pass@1, rewards of 0."""

from __future__ import annotations

from mtrl.diagnose.finding import Finding, Proposal, Severity
from mtrl.diagnose.record import Record
from mtrl.diagnose.registry import rule
from mtrl.diagnose.rules.drop import find_drop
from mtrl.diagnose.rules.equal_groups import NEAR, equal_groups
from mtrl.diagnose.stats import compare, noise
from mtrl.diagnose.views import (
    EQUAL,
    GROUP_SIZE,
    REWARD,
    between_last,
    evaluations,
    from_to,
    known,
    level,
    lr_share,
    other_schemes,
    over_the_run,
    propose,
    propose_each,
    recent,
    values_of,
)
from mtrl.utils.text import percent, short

VALID, PASS_1, ZERO = "rollout/reward/valid_mean", "val/success/pass_k_1", "rollout/reward/zero_frac"
HIGH = 0.6
"""Minimum share of groups without an advantage."""


@rule("R122", "R121", "R087", windows=1.5)
def variance_collapse(record: Record) -> Finding | None:
    """valid_mean falls below the mean reward, which does not rise: few groups with an advantage are left."""
    mean, valid, rise = record.series(REWARD), record.series(VALID), between_last(record, REWARD)
    if rise is None or len(valid) < 10 or level(record, REWARD) > NEAR * record.unit or lr_share(record) < 0.2:
        return None
    width = min(record.window, len(valid) // 2)
    gap = compare(mean.values[-width:], valid.values[-width:], max(noise(mean.values), noise(valid.values)))
    began = float(valid.values[:width].mean() - mean.values[:width].mean())
    equal = level(record, EQUAL)
    grew = over_the_run(record, EQUAL)
    below = gap.at_least(2.0) < -0.02 * record.unit and gap.difference < began - 0.02 * record.unit
    if not below or equal < HIGH or rise.at_least(2.0) > 0 or grew is None or grew.at_least(2.0) <= 0:
        return None
    return Finding(
        severity=Severity.WARNING,
        title=f"valid_mean ({short(gap.after)}) has fallen below mean ({short(gap.before)}) and the reward does "
        "not rise: the variance within groups collapses",
        evidence=known(
            from_to("the share of groups without an advantage", grew),
            from_to("the mean reward of the last two windows", rise),
            from_to("the standard deviation within groups", spread)
            if (spread := over_the_run(record, "analysis/group_reward_std"))
            else None,
            f"valid_mean minus mean went from {short(began)} to {short(gap.difference)}",
        ),
        metrics=(VALID, REWARD, EQUAL, "analysis/group_reward_std"),
        proposals=_more_contrast(record),
        advice="Reward parts of the answer, so that rollouts of one prompt differ again, and remove rows that are "
        "always solved.",
        expect="valid_mean returns to mean and the reward rises again within 25 to 50 steps",
    )


@rule("R137", windows=1.0)
def stagnant_pass_k(record: Record) -> Finding | None:
    """pass@1 falls or does not change while most groups have no advantage: smaller or more varied groups."""
    passes, rise = record.series(PASS_1), between_last(record, REWARD)
    if len(passes) < 3 or level(record, EQUAL) < HIGH or passes.values[-1] >= NEAR or rise is None:
        return None
    if rise.at_least(2.0) > 0 or lr_share(record) < 0.2 or equal_groups(record) is not None:
        return None
    if find_drop(record) is not None:
        return None  # pass@1 fell with the reward
    episodes = max(1.0, float(record.setting("evaluation.sampled_rows") or record.setting("evaluation.rows")))
    error = (max(float(passes.values[-1]) * (1 - float(passes.values[-1])), 0.02) / episodes) ** 0.5
    last, best = float(passes.values[-1]), float(passes.values.max())
    fell = best - last > 3 * error
    is_still = abs(last - float(passes.values[-3])) + 2 * error < 0.08
    if not (fell or is_still):
        return None
    return Finding(
        severity=Severity.WARNING,
        title=f"pass@1 {'fell' if fell else 'stays'} {'from ' + percent(best) + ' to' if fell else 'at'} "
        f"{percent(last)} while {percent(level(record, EQUAL))} of the groups have no advantage",
        evidence=known(evaluations(record, PASS_1, "pass@1"), from_to("the training reward", rise)),
        metrics=(PASS_1, EQUAL, REWARD),
        proposals=_more_contrast(record),
        expect="more informative groups at once, and pass@1 above its old best within 25 to 50 steps",
    )


@rule("R138", "R120", windows=1.0)
def many_zeros(record: Record) -> Finding | None:
    """Nearly every rollout earns exactly 0."""
    zeros, change = recent(record, ZERO), over_the_run(record, ZERO)
    if zeros is None or change is None or zeros.value < 0.9 or change.at_least(2.0) < 0:
        return None
    if equal_groups(record) is not None:
        return None
    return Finding(
        severity=Severity.WARNING if record.steps >= 2 * record.window else Severity.NOTE,
        title=f"{percent(zeros.value)} of the rollouts earn exactly 0",
        evidence=(from_to("the share of rewards of 0", change),),
        metrics=(ZERO, REWARD, EQUAL),
        proposals=_more_contrast(record),
        advice="Reward parts of the answer, or begin with easier rows.",
        expect="rollout/reward/zero_frac falls within 25 to 50 steps",
    )


def _more_contrast(record: Record) -> tuple[Proposal, ...]:
    sizes, prompts = values_of(record, GROUP_SIZE), int(record.setting("trainer.prompts_per_step"))
    size = min(sizes.values())
    temperature = float(record.setting("generator.sampling_params.temperature"))
    found = []
    if size > 4 and len(set(sizes.values())) == 1:
        half = max(4, size // 2)
        found.append(
            propose_each("smaller groups of more prompts", sizes, lambda size: half,
                         trainer__prompts_per_step=prompts * size // half)
        )  # fmt: skip
    found.append(propose("more varied rollouts", generator__sampling_params__temperature=max(1.0, temperature + 0.1)))
    found.append(propose("replace groups without an advantage", algorithm__dynamic_sampling_rounds=3))
    found += [propose("another reward of this task", reward__scheme=scheme) for scheme in other_schemes(record)]
    return tuple(found)
