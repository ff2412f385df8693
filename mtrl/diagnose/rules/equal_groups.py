"""Rule 2: all rollouts of a prompt have the same reward, so there is nothing to learn from."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mtrl.diagnose.finding import Finding, Proposal, Severity
from mtrl.diagnose.record import Record
from mtrl.diagnose.registry import rule
from mtrl.diagnose.rules.drop import find_drop
from mtrl.diagnose.views import (
    EQUAL,
    GROUP_SIZE,
    HELD_OUT,
    REWARD,
    are_cut,
    between_last,
    choice,
    evaluations,
    from_to,
    is_solved,
    known,
    level,
    other_schemes,
    propose,
    propose_each,
    rescoring,
    room_for_responses,
    span,
    values_of,
)  # fmt: skip
from mtrl.utils.text import percent, short

MANY, MOST, NEARLY_ALL = 0.75, 0.8, 0.9
"""Shares of groups without an advantage: for a warning, for an alarm if it lasts for a window, for an immediate
alarm."""
LEAST = 10
"""Minimum number of steps for a decision, however short the window."""
NEAR = 0.75
"""Share of the reward of a success. Above it, most groups agree because they succeed."""


@rule("R149", "R137", "R138", "R014", windows=0.4)
def equal_groups(record: Record) -> Finding | None:
    """Nearly all groups have equal rewards and the reward does not rise: too little contrast within a prompt."""
    steps = max(8, record.window // 2)
    equal = level(record, EQUAL, steps=steps)
    rise = between_last(record, REWARD)
    if equal < MANY or is_solved(record) or rise is None or rise.at_least() > 0 or find_drop(record) is not None:
        return None  # after a collapse, groups agree because of the collapse
    for_long = level(record, EQUAL) >= MOST and record.steps >= max(record.window, LEAST)
    nearly_all = for_long or (equal >= NEARLY_ALL and record.steps >= LEAST)
    if not nearly_all and record.steps < max(record.window, LEAST):
        return None
    sizes, prompts = values_of(record, GROUP_SIZE), int(record.setting("trainer.prompts_per_step"))
    size = max(1, round(record.episodes / prompts))
    rewarded = 1 - level(record, "rollout/reward/zero_frac", 1 - level(record, REWARD) / record.unit)
    contrast, schemes = _Contrast(size, prompts, rewarded, equal), other_schemes(record)
    succeed = level(record, REWARD) >= NEAR * record.unit
    return Finding(
        severity=Severity.NOTE if succeed else Severity.ALARM if nearly_all else Severity.WARNING,
        title=f"In {percent(equal)} of the groups all {choice(sizes)} rollouts have the same reward, and the mean "
        "reward does not rise",
        evidence=known(
            from_to("the mean reward", rise),
            "most of these groups succeed in all rollouts; the other prompts are hardly ever solved"
            if succeed
            else None,
            f"about {short((1 - equal) * prompts)} of {prompts} groups of a step have an advantage; "
            f"{percent(1 - rewarded)} of the rollouts earn exactly 0",
            evaluations(record, "val/success/pass_k_1", "pass@1")
            or evaluations(record, HELD_OUT, "held-out success"),
            contrast.effect_of_smaller_groups() if len(set(sizes.values())) == 1 else None,
        ),
        metrics=(EQUAL, REWARD, "analysis/informative_groups", "rollout/reward/zero_frac"),
        steps=span(record.series(REWARD).last(steps)),
        proposals=_proposals(record, sizes, contrast, schemes),
        advice="A reward with more than two values helps most: reward parts of the answer, or turns that make "
        "progress. Rows that are always or never solved give no gradient at any group size.",
        expect="analysis/informative_groups rises at once, and the reward within 25 to 50 steps",
        look=(f"mtrl view {record.path or 'RUN'}", *rescoring(record, schemes)),
    )  # fmt: skip


def _proposals(record: Record, sizes: dict[str, int], contrast: _Contrast, schemes: list[str]) -> tuple[Proposal, ...]:
    found = [room_for_responses(record)] if are_cut(record) else []  # cut responses earn nothing in any group
    temperature = float(record.setting("generator.sampling_params.temperature"))
    if temperature < 1.0:
        found.append(propose("more varied rollouts", generator__sampling_params__temperature=1.0))
    half, more = contrast.smaller
    if len(set(sizes.values())) == 1 and half < contrast.size and contrast.groups(half, more) >= 1:
        found.append(
            propose_each("more prompts with as many rollouts: fewer groups differ, and there are twice as many",
                         sizes, lambda size: half, trainer__prompts_per_step=more)
        )  # fmt: skip
    rounds = max(3, 2 * int(record.setting("algorithm.dynamic_sampling_rounds")))
    if contrast.groups(contrast.size, (1 + rounds) * contrast.prompts) >= 1:
        found.append(
            propose("replace groups without an advantage by new prompts until the batch is full",
                    algorithm__dynamic_sampling_rounds=rounds)
        )  # fmt: skip
    found += [propose("a denser reward of this task", reward__scheme=scheme) for scheme in schemes]
    found.append(propose_each("more rollouts per prompt", sizes, lambda size: 2 * size))
    return tuple(found)


@dataclass(frozen=True)
class _Contrast:
    """Number of groups with an advantage, now and with other group sizes."""

    size: int
    """Number of rollouts of a group; in a mixture of sources with different sizes their mean."""
    prompts: int
    rewarded: float
    """Share of the rollouts with a reward other than 0."""
    equal: float
    """Share of the groups without an advantage."""

    @property
    def smaller(self) -> tuple[int, int]:
        """Size of smaller groups, and the number of prompts that gives as many rollouts."""
        half = min(self.size, max(4, self.size // 2))
        return half, self.prompts * self.size // half

    def groups(self, size: int, prompts: int) -> float:
        """Return the expected number of groups per step with an advantage, for an all-or-nothing reward whose chances
        differ between prompts as measured. It is 0 if fewer than one rollout per step is rewarded, because then groups
        of other sizes agree as well."""
        if self.rewarded * self.size * self.prompts < 1:
            return 0.0
        return prompts * (1 - self.share_equal(size))

    def share_equal(self, size: int) -> float:
        return share_equal(self.rewarded, spread_of(self.rewarded, self.equal, self.size), size)

    def effect_of_smaller_groups(self) -> str | None:
        """Describe the effect of smaller groups: more of them agree, but the total number with an advantage may
        grow."""
        half, more = self.smaller
        if half == self.size or not 0 < self.rewarded < 1:
            return None
        now, then = self.share_equal(self.size), self.share_equal(half)
        return (
            f"with groups of {half} and {more} prompts, at as many rollouts, {percent(now)} of groups without an "
            f"advantage become {percent(then)}, and {short(self.prompts * (1 - now))} groups with one become "
            f"{short(more * (1 - then))} (for an all-or-nothing reward whose chances differ from prompt to prompt as "
            "measured)"
        )


def share_equal(rewarded: float, spread: float, size: int) -> float:
    """Return the share of groups in which all of `size` rollouts earn a reward, or none does.

    Args:
        rewarded: Mean chance, over prompts, that a rollout earns a reward.
        spread: Spread of the chances of prompts, which follow Beta(rewarded / spread, (1 - rewarded) / spread); 0: all
            prompts have the same chance.
    """
    if spread <= 0:
        return rewarded**size + (1 - rewarded) ** size

    def all_alike(chance: float) -> float:
        return math.prod((chance + i * spread) / (1 + i * spread) for i in range(size))

    return all_alike(rewarded) + all_alike(1 - rewarded)


def spread_of(rewarded: float, equal: float, size: int) -> float:
    """Return the `spread` for which the share `equal` of the groups agree; 0 if equal chances explain the share."""
    low, high = 0.0, 1e4
    if equal <= share_equal(rewarded, 0.0, size):
        return 0.0
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if share_equal(rewarded, middle, size) < equal else (low, middle)
    return high
