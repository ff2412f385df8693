"""Concurrent episodes: the groups of one step, with failed groups replaced as a whole."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from mtrl.engines.base import SamplingParams
from mtrl.errors import RunEndedError
from mtrl.rollout.episode import BaseLoop
from mtrl.rollout.failures import episode_count, excess, last_failure, summary
from mtrl.rollout.pauses import Pauses
from mtrl.types import FAILED, Group, Row, Trajectory

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass
class RolloutReport:
    """The groups of one step, with the failures and the number of episodes that it took to collect them."""

    groups: list[Group]
    failures: list[Trajectory] = field(default_factory=list)
    """Trajectories of the episodes that failed in every attempt; `episode_count` counts the episodes. Their groups are
    not in `groups` if they were replaced."""
    episodes: int = 0


@dataclass
class Rollouts:
    """Runs the episodes of rows, and collects the failures separately."""

    loop: BaseLoop[Any]
    seed: int
    max_failed_share: float
    on_episode: Callable[[Trajectory], None] = lambda trajectory: None
    pauses: Pauses | None = None
    """Limits of the sources of a mixture, which replace those of the run; None for a run on one task."""

    async def collect(
        self,
        key: str,
        rows: Sequence[Row],
        group_size: int | Callable[[Row], int],
        sampling: SamplingParams,
        replacement: Callable[[], Row] | None = None,
    ) -> RolloutReport:
        """Collect one group per row; `key` names the step and seeds its random streams. `group_size` is the number of
        episodes of a group, or a function that returns it for a row.

        A group in which an episode failed is run again on a row from `replacement`: to leave out only the failed
        episode would bias the group towards behaviour that does not fail. Without `replacement` (evaluation) the group
        stays.

        Raises:
            RunEndedError: more than `max_failed_share` of the episodes failed, or replacements keep failing; in a
                mixture, see `Pauses`.
        """
        size = group_size if callable(group_size) else lambda row: group_size
        report = RolloutReport(groups=[])
        pending = [(f"{key}/{i}", row) for i, row in enumerate(rows)]
        failed_rounds = 0
        while pending:
            groups = await all_or_none(self.group(name, row, size(row), sampling) for name, row in pending)
            report.episodes += sum(episode_count(group.trajectories) for group in groups)
            failed = [t for group in groups for t in group.trajectories if t.stop_reason in FAILED]
            failed_ids = {t.group_id for t in failed} if replacement else set()
            report.failures += failed
            report.groups += [group for group in groups if group.group_id not in failed_ids]
            failed_rounds = failed_rounds + 1 if len(failed_ids) == len(groups) else 0
            if failed:
                log.warning("%s", summary(report.failures, report.episodes, failed[0]))
            if self.pauses is not None and replacement:
                for group in groups:
                    self.pauses.note(group)
            elif self.pauses is not None:
                self.pauses.check(groups)
            elif failed:
                self.check(report.failures, report.episodes, failed[0], failed_rounds)
            pending = (
                [(f"{group_id}+", replacement()) for group_id, _ in pending if group_id in failed_ids]
                if replacement
                else []
            )
        return report

    async def group(self, group_id: str, row: Row, size: int, sampling: SamplingParams) -> Group:
        """Run `size` episodes of one row concurrently. Each has its own random stream, seeded by its group's name and
        its index. In self-play each gives a trajectory per trained role."""
        episodes = await all_or_none(self._episode(group_id, row, i, sampling) for i in range(size))
        return Group(group_id, row, [trajectory for roles in episodes for trajectory in roles])

    async def _episode(self, group_id: str, row: Row, index: int, sampling: SamplingParams) -> list[Trajectory]:
        seed = stream_seed(self.seed, group_id, index)
        trajectories = await self.loop.run_roles(row, group_id, index, replace(sampling, seed=seed))
        for trajectory in trajectories:
            self.on_episode(trajectory)
        return trajectories

    def check(self, failures: Sequence[Trajectory], episodes: int, newest: Trajectory, failed_rounds: int) -> None:
        """End the run if too many of these episodes failed; `newest` is the latest failure.

        Raises:
            RunEndedError: see `excess`.
        """
        if (why := excess(episode_count(failures), episodes, failed_rounds, self.max_failed_share)) is not None:
            raise RunEndedError(f"{why}; {last_failure(newest)}")


async def all_or_none(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return all results, in order. If one coroutine raises, or the caller is cancelled, the others are cancelled."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        if running := [task for task in tasks if not task.done()]:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        tasks.clear()  # an error references this frame, whose tasks would reference the error


def stream_seed(seed: int, group_id: str, index: int) -> int:
    """Return a 64-bit seed for one trajectory's random stream."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{group_id}/{index}".encode(), digest_size=8).digest(), "little")
