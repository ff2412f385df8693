"""The stream: groups are sampled during updates, within a hard bound on the staleness of trained tokens."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from typing import Any

from mtrl.rollout.failures import episode_count, summary
from mtrl.rollout.rollouts import RolloutReport
from mtrl.trainer.data.admission import Admission, Outstanding, RequeueAdmission
from mtrl.trainer.data.experience import Experience, Producer, StoppedError, Unused
from mtrl.types import FAILED, Group, Trajectory

log = logging.getLogger(__name__)

ADMISSIONS: dict[str, type[Admission]] = {"wait": Admission, "requeue": RequeueAdmission}
"""Admission class by the value of `async_config.on_stale`."""


@dataclass
class BatchTally:
    """Counts and groups since the last batch was handed over."""

    report: RolloutReport = field(default_factory=lambda: RolloutReport(groups=[]))
    set_aside: list[Group] = field(default_factory=list)
    admitted: int = 0
    requeued: int = 0


@dataclass
class EpisodeCounts:
    """Number of episodes of one group, and the trajectories of those that failed."""

    episodes: int
    failures: list[Trajectory]


@dataclass
class Stream(Producer):
    """Samples groups continuously, with one task per group; `mtrl/trainer/data/admission.py` decides which groups start
    and which are trained.

    Everything here runs on the event loop, so the update must run in a separate thread, which the loop awaits. Rewards
    and scores are computed in another thread, one group after another, because a scorer may run commands and users'
    scorers need not be thread-safe. An error in a task is raised by the waiting `collect`, or by the next one.
    """

    busy: Callable[[float, float], None] = lambda start, end: None
    """Function that is called with start and end, in seconds of `time.perf_counter`, of each interval in which a group
    was in progress; intervals are divided when new weights arrive."""
    scoring_thread: Executor = field(default_factory=lambda: ThreadPoolExecutor(1, "mtrl-scoring"))
    """Executor of the computation of rewards and scores; it must run one call at a time."""

    def __post_init__(self) -> None:
        super().__post_init__()
        settings = self.config.async_config
        self.admission = ADMISSIONS[settings.on_stale](
            self._wanted, settings.max_steps_off_policy, settings.max_concurrent_groups, self.config.trainer.max_steps
        )
        self.activity = Activity(self.busy)
        self._started = self._stopped = self._closed = False
        self.tasks: dict[Outstanding, asyncio.Task[None]] = {}
        """Tasks of the groups that are being sampled, scored or aborted."""
        self._running: set[Outstanding] = set()
        """Groups in `tasks` whose episodes are not finished."""
        self.finished: dict[Outstanding, Group] = {}
        """Groups with rewards that are not handed over for training yet."""
        self._tally = BatchTally()
        self._recent_counts: deque[EpisodeCounts] = deque(maxlen=self._wanted)
        """Counts of the last groups, as many as a step has; the limits on failures apply to them."""
        self._failed_in_a_row = 0
        """Number of groups with a failure since the last group without one."""
        self.error: BaseException | None = None
        """First error of a task, which `collect` raises."""
        self._changed = asyncio.Event()

    async def collect(self, step: int) -> Experience:
        """See `Producer.collect`. Waits until `Admission.choose` returns a batch; its groups are in the order of
        admission.

        Raises:
            StoppedError: see `Producer.stop`.
            RuntimeError: other code cancelled a task; or a token is too old, which would be a bug.
        """
        self._begin(step)
        start, straggler_seconds = time.perf_counter(), 0.0
        while (batch := self._choose()) is None:
            if self._stopped:
                raise StoppedError
            has_enough, since = len(self.finished) >= self._wanted, time.perf_counter()
            self._changed.clear()
            await self._changed.wait()
            straggler_seconds += has_enough * (time.perf_counter() - since)
        wait_seconds = time.perf_counter() - start
        batch.sort(key=lambda slot: slot.number)
        self.admission.hand_over(batch)
        groups = [self.finished.pop(slot) for slot in batch]
        for group in groups:
            self._check_age(group)
        self.composer.check()
        tally, self._tally = self._tally, BatchTally()
        ages = [step - slot.version for slot in batch]
        flow = {
            "async/admitted": float(tally.admitted),
            "async/in_flight": float(len(self._running)),
            "async/ready": float(len(self.finished)),
            "async/requeued": float(tally.requeued),
            "async/age/mean": fmean(ages),
            "async/age/max": float(max(ages)),
            "async/wait_seconds": wait_seconds,
            "async/straggler_seconds": straggler_seconds,
            "async/idle_seconds": self.activity.take_idle(),
        }
        tally.report.groups = [*groups, *tally.set_aside]
        rounds = -(-len(tally.set_aside) // self._wanted)
        return Experience(groups, tally.report, tally.set_aside, rounds, flow)

    def publish(self, version: int) -> None:
        """See `Producer.publish`. Groups that have become too old are aborted (only with `on_stale=requeue`), and new
        groups are admitted in place of the trained ones."""
        self.admission.trained(version)
        self.activity.cut()
        self._requeue_overdue()
        self._admit()

    def take_back(self, groups: Sequence[Group]) -> None:
        """See `Producer.take_back`. The groups are finished again, and `state` stores them."""
        self.finished |= dict(zip(self.admission.take_back(), groups, strict=True))

    def stop(self) -> None:
        """See `Producer.stop`. A waiting `collect` ends; groups in progress continue until `close`."""
        self._stopped = True
        self._changed.set()

    async def reward_and_score(self, groups: Sequence[Group]) -> None:
        """See `Producer.reward_and_score`. It runs in the same thread as the scoring of the stream's own groups,
        alternating with it."""
        for group in groups:
            await asyncio.get_running_loop().run_in_executor(self.scoring_thread, self._run_reward_and_score, group)

    def state(self) -> list[dict[str, Any]]:
        """See `Producer.state`. Finished groups are stored with their versions, other groups without trajectories.
        Groups that are being trained count as trained, and groups that were set aside are not stored."""
        admission = self.admission
        slots = sorted([*admission.outstanding, *admission.again], key=lambda slot: slot.number)
        finished = (self.finished.get(slot) or Group(slot.group_id, slot.row, []) for slot in slots)
        unused = [Unused(slot.number, slot.version, group) for slot, group in zip(slots, finished, strict=True)]
        return [admission.counters(), *(entry.to_dict() for entry in unused)]

    def restore(self, state: list[dict[str, Any]]) -> None:
        """See `Producer.restore`. Prompts that were in progress start again before any new prompt; finished groups that
        are too old under changed settings are sampled again."""
        for entry in state:
            if "group" not in entry:
                self.admission.count_from(**entry)
                continue
            unused = Unused.from_dict(entry)
            slot = Outstanding(unused.number, unused.group.group_id, unused.group.row, unused.version)
            if unused.group.trajectories:
                self.admission.put_finished(slot)
                self.finished[slot] = unused.group
            else:
                self.admission.put_back(slot)

    async def close(self) -> None:
        """Abort the groups in progress and wait until their environments are closed and their sessions released.

        An environment that was already closing is closed by its own thread, possibly a moment later.
        """
        self._closed = True
        for task in self.tasks.values():
            task.cancel()
        while self.tasks:
            await asyncio.wait(list(self.tasks.values()))
        self.activity.note(False)
        self.scoring_thread.shutdown(wait=False, cancel_futures=True)

    # -- admission ----------------------------------------------------------------------------------------------------

    def _begin(self, step: int) -> None:
        if not self._started:
            self._started = True
            self.admission.begin(step)
            self.activity.note(False)
            self._requeue_overdue()
            self._admit()
        if step != self.admission.version or self.admission.training:
            raise RuntimeError(
                f"collect({step}) after publish({self.admission.version}): publish every step before the next one"
            )

    def _admit(self) -> None:
        """Start all groups that may start."""
        while not (self._closed or self.error) and self.admission.may_admit(len(self._running)):
            try:
                slot = self.admission.admit(self.next_row)
            except Exception as error:  # a user's data set can raise any error
                self._fail(error)
                break
            self._tally.admitted += 1
            task = asyncio.get_running_loop().create_task(self._play(slot), name=f"group {slot.group_id}")
            self.tasks[slot] = task
            self._running.add(slot)
            task.add_done_callback(partial(self._ended, slot))
        self.activity.note(bool(self._running))

    def _requeue_overdue(self) -> None:
        for slot in self.admission.overdue(self.finished):
            self.admission.requeue(slot)
            self._tally.requeued += 1
            self.finished.pop(slot, None)
            if slot in self.tasks:
                self.tasks[slot].cancel()

    def _choose(self) -> list[Outstanding] | None:
        """Return the next batch, or None if none is ready. Raise the first error of a task, if any."""
        if self.error is None:
            self._check_signal()
        if self.error is not None:
            raise self.error
        return self.admission.choose(self.finished)

    def _check_signal(self) -> None:
        """Fail if dynamic sampling finds too few groups: since the last step, more groups without an advantage were set
        aside than (K + 1) B x `dynamic_sampling_rounds`, and there is still no batch."""
        allowed = self.config.algorithm.dynamic_sampling_rounds * self.admission.limit
        without_advantage = self._tally.set_aside
        if len(without_advantage) > allowed and len(self.finished) < self._wanted:
            self._fail(self._too_few(len(self.finished), [*self.finished.values(), *without_advantage]))

    # -- the task of a group ------------------------------------------------------------------------------------------

    async def _play(self, slot: Outstanding) -> None:
        group = await self.rollouts.group(slot.group_id, slot.row, self.group_size(slot.row), self.sampling)
        self._running.discard(slot)
        if self._failed(group):
            self.admission.failed(slot, self.next_row())
            return
        self._admit()
        trained = await asyncio.get_running_loop().run_in_executor(self.scoring_thread, self._reward_and_check, group)
        self._note_success(group)
        if trained:
            self.finished[slot] = group
        else:
            self.admission.set_aside(slot)
            self._tally.set_aside.append(group)

    def _run_reward_and_score(self, group: Group) -> None:
        asyncio.run(self._reward_and_score([group]))

    def _reward_and_check(self, group: Group) -> bool:
        """Compute rewards and scores of a group, in the scoring thread. Return whether it is trained."""
        asyncio.run(self._reward_for_training(group))
        return self._is_trained(group)

    def _failed(self, group: Group) -> bool:
        """Count failed episodes. Return whether an episode failed after all retries, so that the whole group is
        replaced.

        Raises:
            RunEndedError: too many episodes failed.
        """
        failed = [trajectory for trajectory in group.trajectories if trajectory.stop_reason in FAILED]
        counts = EpisodeCounts(episode_count(group.trajectories), failed)
        self._tally.report.episodes += counts.episodes
        self._tally.report.failures += counts.failures
        self._recent_counts.append(counts)
        self._failed_in_a_row = self._failed_in_a_row + 1 if counts.failures else 0
        failures = [t for past in self._recent_counts for t in past.failures]
        if counts.failures:
            log.warning("%s", summary(counts.failures, counts.episodes, counts.failures[0]))
        if self.rollouts.pauses is not None:
            self.rollouts.pauses.note(group)
        elif failures and len(self._recent_counts) == self._wanted:
            episodes = sum(past.episodes for past in self._recent_counts)
            self.rollouts.check(failures, episodes, failures[-1], self._failed_in_a_row // self._wanted)
        return bool(counts.failures)

    def _ended(self, slot: Outstanding, task: asyncio.Task[None]) -> None:
        del self.tasks[slot]
        self._running.discard(slot)
        if task.cancelled():
            if slot in self.admission.outstanding and not self._closed:
                self._fail(
                    RuntimeError(f"the episodes of group {slot.group_id} were cancelled, and not by the trainer")
                )
        elif (error := task.exception()) is not None:
            self._fail(error)
        self._admit()
        self._changed.set()

    def _fail(self, error: BaseException) -> None:
        """Store the first error, which stops admissions and which `collect` raises."""
        self.error = self.error or error
        self._changed.set()

    def _check_age(self, group: Group) -> None:
        ages = [self.admission.version - (t.oldest_version or 0) for t in group.trajectories if t.action_tokens]
        if max(ages, default=0) > self.admission.lag:
            raise RuntimeError(
                f"group {group.group_id} has a token that was sampled {max(ages)} training steps ago, more than "
                f"async_config.max_steps_off_policy={self.admission.lag}; this is a bug of mtrl"
            )


class Activity:
    """Busy intervals and idle time of the generator."""

    def __init__(self, report: Callable[[float, float], None]):
        """`report(start, end)` is called for each busy interval, in seconds of `time.perf_counter`."""
        self.report = report
        self._busy = False
        self._since: float | None = None
        self._idle = 0.0

    def note(self, busy: bool) -> None:
        """Record that the generator is busy, or idle, from now on."""
        if self._since is None or busy != self._busy:
            self.cut()
            self._busy = busy

    def cut(self) -> None:
        """End the current interval and start a new one of the same kind."""
        now = time.perf_counter()
        if self._since is not None and self._busy:
            self.report(self._since, now)
        elif self._since is not None:
            self._idle += now - self._since
        self._since = now

    def take_idle(self) -> float:
        """Return the idle time since the last call, in seconds."""
        if not self._busy:
            self.cut()
        seconds, self._idle = self._idle, 0.0
        return seconds
