"""Experience: the groups that a training step learns from, played, paid and scored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import fmean

from mtrl.algorithms.advantages import turn_advantages
from mtrl.algorithms.signal import is_informative
from mtrl.config.schema import Config
from mtrl.environments.family import Family
from mtrl.errors import UserError
from mtrl.evaluation.heldout import score_group
from mtrl.generator.engines.base import SamplingParams
from mtrl.generator.rollouts import RolloutReport, Rollouts
from mtrl.rewards.compose import RewardComposer
from mtrl.types import Group, Row, StopReason

OVERLONG = frozenset({StopReason.TURN_TOKEN_LIMIT, StopReason.CONTEXT_LIMIT})
"""Ends of episodes that a length limit cut."""


class RunEndedError(UserError):
    """The run ends before its last step; what it has learnt so far is worth keeping."""


class NoSignalError(RunEndedError):
    """The run has nothing to learn from."""


class SymptomError(RunEndedError):
    """The diagnosis ends the run (`diagnosis.live=stop`)."""


@dataclass
class Experience:
    """What one step has to learn from."""

    groups: list[Group]
    """The groups to train on."""
    report: RolloutReport
    """All that was played; its groups are `groups` and those set aside."""
    set_aside: list[Group] = field(default_factory=list)
    """Groups without an advantage that dynamic sampling replaced."""
    rounds: int = 0
    """Rounds of replacements."""

    def metrics(self) -> dict[str, float]:
        """`analysis/set_aside_groups`, `analysis/sampling_rounds`, and the share of trajectories not trained on."""
        played = [trajectory for group in self.groups for trajectory in group.trajectories]
        return {
            "analysis/set_aside_groups": float(len(self.set_aside)),
            "analysis/sampling_rounds": float(self.rounds),
            "analysis/untrained_frac": fmean(not trajectory.trainable for trajectory in played),
        }


@dataclass
class Collector:
    """Plays the groups of a step; with dynamic sampling until each of them teaches something."""

    config: Config
    rollouts: Rollouts
    composer: RewardComposer
    family: Family
    sampling: SamplingParams
    next_row: Callable[[], Row]

    async def collect(self, step: int) -> Experience:
        """The experience of training step `step` (0-based).

        With `dynamic_sampling_rounds` groups without an advantage are set aside and new prompts played instead (DAPO,
        2503.14476, section 3.2): the number of groups is that of the configuration, and all of them have a gradient.

        Raises:
            NoSignalError: after so many rounds there are still not enough of them.
        """
        wanted, rounds = self.config.trainer.prompts_per_step, self.config.algorithm.dynamic_sampling_rounds
        found = Experience([], RolloutReport(groups=[]))
        while len(found.groups) < wanted:
            key = f"step{step}" if not found.rounds else f"step{step}.{found.rounds}"
            groups = await self._play(key, wanted - len(found.groups), found.report)
            if not rounds:
                found.groups = groups
                break
            for group in groups:
                (found.groups if self._teaches(group) else found.set_aside).append(group)
            if len(found.groups) < wanted:
                if found.rounds == rounds:
                    raise self._too_few(found)
                found.rounds += 1
        return found

    async def _play(self, key: str, prompts: int, total: RolloutReport) -> list[Group]:
        rows = [self.next_row() for _ in range(prompts)]
        size = self.config.algorithm.group_size
        report = await self.rollouts.collect(key, rows, size, self.sampling, self.next_row)
        for group in report.groups:
            await self.composer.apply_async(group)
            score_group(self.family, group)
            for trajectory in group.trajectories:
                if self.config.algorithm.overlong_filtering and trajectory.stop_reason in OVERLONG:
                    trajectory.trainable = False
        self.composer.check()
        total.groups += report.groups
        total.failures += report.failures
        total.episodes += report.episodes
        return report.groups

    def _teaches(self, group: Group) -> bool:
        return is_informative(turn_advantages([group], self.config.algorithm, self.composer.weights)[0])

    def _too_few(self, found: Experience) -> NoSignalError:
        mean = fmean(t.reward for group in found.report.groups for t in group.trajectories)
        return NoSignalError(
            f"after algorithm.dynamic_sampling_rounds={self.config.algorithm.dynamic_sampling_rounds} rounds of new "
            f"prompts only {len(found.groups)} of {len(found.report.groups)} groups had an advantage, and a step needs "
            f"trainer.prompts_per_step={self.config.trainer.prompts_per_step} (the mean reward is {mean:.3f}): give "
            "harder or easier rows, a denser reward, a larger algorithm.group_size or more rounds"
        )
