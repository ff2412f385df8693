"""Experience: the groups that a training step learns from, played, paid and scored."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

from mtrl.algorithms.advantages import turn_advantages
from mtrl.algorithms.signal import is_informative
from mtrl.config.schema import Config
from mtrl.environments.family import Family
from mtrl.errors import RunEndedError
from mtrl.evaluation.heldout import score_groups
from mtrl.evaluation.measures import is_overlong
from mtrl.generator.engines.base import SamplingParams
from mtrl.generator.occupancy import Occupancy
from mtrl.generator.rollouts import RolloutReport, Rollouts
from mtrl.rewards.compose import RewardComposer
from mtrl.types import Group, Row, group_from_dict


class NoSignalError(RunEndedError):
    """The run has nothing to learn from."""


class SymptomError(RunEndedError):
    """The diagnosis ends the run (`diagnosis.live=stop`)."""


class StoppedError(Exception):
    """The run was asked to stop while it waited for groups (`Producer.stop`)."""


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
    flow: dict[str, float] = field(default_factory=dict)
    """`async/…`: how rollouts and updates kept up with each other, where they overlap."""

    def metrics(self) -> dict[str, float]:
        """`analysis/set_aside_groups`, `analysis/sampling_rounds`, the share of trajectories not trained on, and the
        `async/…` of runs whose rollouts and updates overlap (`mtrl/trainer/stream.py`)."""
        played = [trajectory for group in self.groups for trajectory in group.trajectories]
        return {
            "analysis/set_aside_groups": float(len(self.set_aside)),
            "analysis/sampling_rounds": float(self.rounds),
            "analysis/untrained_frac": fmean(not trajectory.trainable for trajectory in played),
            **self.flow,
        }


@dataclass
class Unused:
    """A group that a checkpoint keeps: drawn, and not trained yet."""

    number: int
    """Which admission it was, from 0."""
    version: int
    """Training steps done when it was admitted."""
    group: Group
    """Without trajectories if it was not finished; its prompt is then played anew."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Unused:
        return cls(data["number"], data["version"], group_from_dict(data["group"]))


@dataclass
class Producer(ABC):
    """Where the loop gets its experience from, and what every way of getting it does with the groups that it played.

    The loop calls `collect`, learns, puts the new weights into the engine, and calls `publish`.
    """

    config: Config
    rollouts: Rollouts
    composer: RewardComposer
    family: Family
    sampling: SamplingParams
    next_row: Callable[[], Row]
    paying: Occupancy = field(default_factory=Occupancy, init=False)
    """When rewards and scores were computed."""

    @abstractmethod
    async def collect(self, step: int) -> Experience:
        """The experience of training step `step` (0-based).

        Raises:
            StoppedError: `stop` was called, and there is nothing to train yet.
            NoSignalError: dynamic sampling does not find enough groups with an advantage.
            UserError: too many episodes fail, or a reward or a scorer is of no use.
        """

    @abstractmethod
    def publish(self, version: int) -> None:
        """The engine has the weights of `version`, which is the number of training steps done."""

    @abstractmethod
    def stop(self) -> None:
        """Wait for no group any more, where nothing is lost by that: `state` has all of them."""

    @abstractmethod
    def state(self) -> list[dict[str, Any]]:
        """Plain JSON: whatever was drawn and not trained (`Unused`)."""

    @abstractmethod
    def restore(self, state: list[dict[str, Any]]) -> None:
        """Go on from `state`, before the first `collect`; no prompt of it is lost and none is played twice."""

    @abstractmethod
    async def close(self) -> None:
        """Stop whatever runs."""

    @property
    def _wanted(self) -> int:
        return self.config.trainer.prompts_per_step

    async def judge(self, groups: Sequence[Group]) -> None:
        """Rewards and scores, in place, of groups that are not trained; nothing else is judged at the same time."""
        await self._score(groups)

    async def _score(self, groups: Sequence[Group]) -> None:
        for group in groups:
            await self.composer.apply_async(group)
        await score_groups(self.family, groups, self.config.environment.episode_timeout)

    async def _pay(self, group: Group) -> None:
        """Rewards and scores, in place."""
        with self.paying:
            await self._score([group])
        for trajectory in group.trajectories:
            if self.config.algorithm.overlong_filtering and is_overlong(trajectory):
                trajectory.trainable = False

    def _teaches(self, group: Group) -> bool:
        """Whether it is trained: with dynamic sampling (DAPO, 2503.14476, section 3.2) only with an advantage."""
        if not self.config.algorithm.dynamic_sampling_rounds:
            return True
        return is_informative(turn_advantages([group], self.config.algorithm, self.composer.weights)[0])

    def _too_few(self, teaching: int, played: Sequence[Group]) -> NoSignalError:
        mean = fmean(t.reward for group in played for t in group.trajectories)
        return NoSignalError(
            f"after algorithm.dynamic_sampling_rounds={self.config.algorithm.dynamic_sampling_rounds} rounds of new "
            f"prompts only {teaching} of {len(played)} groups had an advantage, and a step needs "
            f"trainer.prompts_per_step={self._wanted} (the mean reward is {mean:.3f}): give "
            "harder or easier rows, a denser reward, a larger algorithm.group_size or more rounds"
        )


@dataclass
class Collector(Producer):
    """Plays the groups of a step while nothing else happens; with dynamic sampling until each teaches something."""

    _left: deque[Unused] = field(default_factory=deque)
    """Of a run whose rollouts and updates overlapped, and which goes on without: played before any new prompt."""
    _taken: int = 0
    """So many of them are played in this step; a step that fails leaves them to the next run."""

    async def collect(self, step: int) -> Experience:
        """See `Producer.collect`. Groups without an advantage are replaced in at most `dynamic_sampling_rounds`: the
        number of groups is that of the configuration, and all of them have a gradient."""
        rounds = self.config.algorithm.dynamic_sampling_rounds
        found = Experience([], RolloutReport(groups=[]))
        while len(found.groups) < self._wanted:
            key = f"step{step}" if not found.rounds else f"step{step}.{found.rounds}"
            for group in await self._play(key, self._wanted - len(found.groups), found.report):
                (found.groups if self._teaches(group) else found.set_aside).append(group)
            if len(found.groups) < self._wanted:
                if found.rounds == rounds:
                    raise self._too_few(len(found.groups), found.report.groups)
                found.rounds += 1
        return found

    def publish(self, version: int) -> None:
        """Nothing is in flight between two steps."""
        for _ in range(self._taken):
            self._left.popleft()
        self._taken = 0

    def stop(self) -> None:
        """The step is played to its end: its prompts are drawn, and a resumption has to make the same steps."""

    def state(self) -> list[dict[str, Any]]:
        return [unused.to_dict() for unused in self._left]

    def restore(self, state: list[dict[str, Any]]) -> None:
        """See `Producer.restore`. What had been played under older weights is played anew."""
        self._left = deque(Unused.from_dict(entry) for entry in state if "group" in entry)

    async def close(self) -> None:
        """Nothing runs between two steps."""

    async def _play(self, key: str, prompts: int, total: RolloutReport) -> list[Group]:
        rows = [self._next_row() for _ in range(prompts)]
        size = self.config.algorithm.group_size
        report = await self.rollouts.collect(key, rows, size, self.sampling, self._next_row)
        for group in report.groups:
            await self._pay(group)
        self.composer.check()
        total.groups += report.groups
        total.failures += report.failures
        total.episodes += report.episodes
        return report.groups

    def _next_row(self) -> Row:
        if self._taken == len(self._left):
            return self.next_row()
        self._taken += 1
        return self._left[self._taken - 1].group.row
