"""Experience: the groups of a training step, with rewards and scores."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from mtrl.algorithms.signal import is_informative
from mtrl.config.mixture import group_sizes, source_of
from mtrl.config.schema import Config
from mtrl.engines.base import SamplingParams
from mtrl.environments.family import Family
from mtrl.errors import RunEndedError
from mtrl.rewards.compose import RewardComposer
from mtrl.rollout.episode import Occupancy
from mtrl.rollout.rollouts import RolloutReport, Rollouts
from mtrl.scoring.agreement import succeeded
from mtrl.scoring.heldout import score_groups
from mtrl.scoring.measures import is_overlong
from mtrl.trainer.data.samples import advantages_of
from mtrl.types import Group, Row, group_from_dict, to_dict

log = logging.getLogger(__name__)


class NoSignalError(RunEndedError):
    """The run finds no groups with an advantage."""


class SymptomError(RunEndedError):
    """The diagnosis ends the run (`diagnosis.live=stop`)."""


class StoppedError(Exception):
    """The run was asked to stop (`Producer.stop`) while it waited for groups."""


@dataclass
class Experience:
    """The data of one training step."""

    groups: list[Group]
    """Groups to train on."""
    report: RolloutReport
    """Report on all episodes of the step; its groups are `groups` and `set_aside`."""
    set_aside: list[Group] = field(default_factory=list)
    """Groups without an advantage that dynamic sampling replaced."""
    rounds: int = 0
    """Number of rounds of replacements."""
    flow: dict[str, float] = field(default_factory=dict)
    """Metrics `async/…` of the overlap of rollouts and updates; empty without overlap."""

    def metrics(self) -> dict[str, float]:
        """Return `analysis/set_aside_groups`, `analysis/sampling_rounds`, `analysis/untrained_frac` (the share of
        trajectories that are not trained on), and the metrics `async/…` of runs whose rollouts and updates overlap
        (`mtrl/trainer/data/stream.py`)."""
        trajectories = [trajectory for group in self.groups for trajectory in group.trajectories]
        return {
            "analysis/set_aside_groups": float(len(self.set_aside)),
            "analysis/sampling_rounds": float(self.rounds),
            "analysis/untrained_frac": fmean(not trajectory.trainable for trajectory in trajectories),
            **self.flow,
        }


@dataclass
class Unused:
    """A group in a checkpoint that was drawn and not trained yet."""

    number: int
    """Number of the admission, from 0."""
    version: int
    """Number of training steps done at the admission."""
    group: Group
    """The group; without trajectories if it was not finished, in which case its prompt is sampled again."""

    def to_dict(self) -> dict[str, Any]:
        """Convert to a dict that can be written as JSON."""
        return {"number": self.number, "version": self.version, "group": deepcopy(to_dict(self.group))}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Unused:
        return cls(data["number"], data["version"], group_from_dict(data["group"]))


def of_sources(state: Sequence[dict[str, Any]], sources: Collection[str]) -> list[dict[str, Any]]:
    """Return a `Producer.state` without the groups of sources that a resumed mixture no longer has, and warn of them.

    Args:
        sources: names of the sources; empty for a run of one task, which keeps all groups.
    """
    kept = [
        entry
        for entry in state
        if not sources or "group" not in entry or source_of(str(entry["group"]["row"]["id"])) in sources
    ]
    if left_out := len(state) - len(kept):
        log.warning(
            "the checkpoint's untrained groups of sources that `environments` no longer has are left out: %d", left_out
        )
    return kept


@dataclass
class Producer(ABC):
    """Source of the loop's experience: base class with the computation of rewards and scores.

    The loop calls `collect`, trains, calls `trained`, loads the new weights into the engine, and calls `publish`.
    """

    config: Config
    rollouts: Rollouts
    composer: RewardComposer
    family: Family
    sampling: SamplingParams
    next_row: Callable[[], Row]
    note_success: Callable[[Row, float], None] = lambda row, success: None
    """Function that is called once for each group that was sampled for training and scored, with its row and the share
    of its episodes that succeeded by the scorer, 0 to 1."""
    reward_clock: Occupancy = field(default_factory=Occupancy, init=False)
    """Clock of the time in which rewards and scores were computed."""

    def __post_init__(self) -> None:
        self._group_sizes = group_sizes(self.config)

    def group_size(self, row: Row) -> int:
        """Return the number of trajectories of the group of a training row."""
        size = self.config.algorithm.group_size
        return self._group_sizes.get(source_of(str(row["id"])), size) if self._group_sizes else size

    @abstractmethod
    async def collect(self, step: int) -> Experience:
        """Return the experience of training step `step` (0-based).

        Raises:
            StoppedError: `stop` was called, and no batch is ready for training.
            NoSignalError: dynamic sampling does not find enough groups with an advantage.
            UserError: too many episodes fail, or a reward or a scorer fails or returns an invalid value.
        """

    def trained(self) -> None:  # noqa: B027
        """Note that the groups that `collect` has returned last are trained. `state` no longer stores them, also if the
        new weights do not reach the engine."""

    @abstractmethod
    def publish(self, version: int) -> None:
        """Note that the engine has the weights of `version`, which is the number of training steps done."""

    @abstractmethod
    def take_back(self, groups: Sequence[Group]) -> None:
        """Store again the unchanged groups that `collect` has returned last, because the run ends before they are
        trained."""

    @abstractmethod
    def stop(self) -> None:
        """Stop waiting for groups, if no group is lost by that, because `state` contains all of them."""

    @abstractmethod
    def state(self) -> list[dict[str, Any]]:
        """Return all groups that were drawn and not trained (`Unused`), as values that can be written as JSON."""

    @abstractmethod
    def restore(self, state: list[dict[str, Any]]) -> None:
        """Continue from `state`, before the first `collect`. No prompt of it is lost, and none is trained twice."""

    @abstractmethod
    async def close(self) -> None:
        """Stop everything that is still running."""

    @property
    def _wanted(self) -> int:
        return self.config.trainer.prompts_per_step

    async def reward_and_score(self, groups: Sequence[Group]) -> None:
        """Compute rewards and scores, in place, of groups that are not trained. No other groups are rewarded or
        scored at the same time."""
        await self._reward_and_score(groups)

    async def _reward_and_score(self, groups: Sequence[Group]) -> None:
        for part in (part for group in groups for part in group.by_role()):
            await self.composer.apply_async(part)
        await score_groups(self.family, groups, self.config.environment.episode_timeout)

    async def _reward_for_training(self, group: Group) -> None:
        """Compute rewards and scores of a group for training, in place, and apply overlong filtering."""
        with self.reward_clock:
            await self._reward_and_score([group])
        for trajectory in group.trajectories:
            if self.config.algorithm.overlong_filtering and is_overlong(trajectory):
                trajectory.trainable = False

    def _note_success(self, group: Group) -> None:
        threshold = self.config.evaluation.success_threshold
        if scored := [t for t in group.trajectories if t.score is not None]:
            self.note_success(group.row, fmean(succeeded(t, threshold) for t in scored))

    def _is_trained(self, group: Group) -> bool:
        """Return whether the group is trained: with dynamic sampling (DAPO, 2503.14476, section 3.2) only if it has an
        advantage."""
        if not self.config.algorithm.dynamic_sampling_rounds:
            return True
        return is_informative(group, advantages_of([group], self.config.algorithm, self.composer)[0])

    def _too_few(self, informative: int, groups: Sequence[Group]) -> NoSignalError:
        mean = fmean(t.reward for group in groups for t in group.trajectories)
        return NoSignalError(
            f"after algorithm.dynamic_sampling_rounds={self.config.algorithm.dynamic_sampling_rounds} rounds of new "
            f"prompts only {informative} of {len(groups)} groups had an advantage, and a step needs "
            f"trainer.prompts_per_step={self._wanted} (the mean reward is {mean:.3f}): give "
            "harder or easier rows, a denser reward, a larger algorithm.group_size or more rounds"
        )


@dataclass
class Collector(Producer):
    """Samples the groups of a step without overlap with updates; with dynamic sampling, until all of them have an
    advantage."""

    _resumed: deque[Unused] = field(default_factory=deque)
    """Groups left by a run with overlap that is resumed without overlap; their prompts are sampled before any new
    one."""
    _resumed_used: int = 0
    """Number of groups of `_resumed` that are used in this step; a step that fails leaves them to the next run."""

    async def collect(self, step: int) -> Experience:
        """See `Producer.collect`. Groups without an advantage are replaced in at most `dynamic_sampling_rounds` rounds;
        the number of groups is that of the configuration, and all of them have a gradient."""
        rounds = self.config.algorithm.dynamic_sampling_rounds
        found = Experience([], RolloutReport(groups=[]))
        while len(found.groups) < self._wanted:
            key = f"step{step}" if not found.rounds else f"step{step}.{found.rounds}"
            for group in await self._play(key, self._wanted - len(found.groups), found.report):
                (found.groups if self._is_trained(group) else found.set_aside).append(group)
            if len(found.groups) < self._wanted:
                if found.rounds == rounds:
                    raise self._too_few(len(found.groups), found.report.groups)
                found.rounds += 1
        return found

    def trained(self) -> None:
        """See `Producer.trained`. The groups of `_resumed` that the step used are removed."""
        for _ in range(self._resumed_used):
            self._resumed.popleft()
        self._resumed_used = 0

    def publish(self, version: int) -> None:
        """Do nothing, since no group is sampled before the next `collect`."""

    def take_back(self, groups: Sequence[Group]) -> None:
        """Do nothing: rows count as drawn only after the update, so a resumed run samples the same groups again."""

    def stop(self) -> None:
        """Do nothing: the step is completed, since its prompts are drawn and a resumed run must make the same steps."""

    def state(self) -> list[dict[str, Any]]:
        return [unused.to_dict() for unused in self._resumed]

    def restore(self, state: list[dict[str, Any]]) -> None:
        """See `Producer.restore`. Groups that were sampled by older weights are sampled again."""
        self._resumed = deque(Unused.from_dict(entry) for entry in state if "group" in entry)

    async def close(self) -> None:
        """Do nothing, since nothing is running between two steps."""

    async def _play(self, key: str, prompts: int, total: RolloutReport) -> list[Group]:
        rows = [self._next_row() for _ in range(prompts)]
        report = await self.rollouts.collect(key, rows, self.group_size, self.sampling, self._next_row)
        for group in report.groups:
            await self._reward_for_training(group)
            self._note_success(group)
        self.composer.check()
        total.groups += report.groups
        total.failures += report.failures
        total.episodes += report.episodes
        return report.groups

    def _next_row(self) -> Row:
        if self._resumed_used == len(self._resumed):
            return self.next_row()
        self._resumed_used += 1
        return self._resumed[self._resumed_used - 1].group.row
