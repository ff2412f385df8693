"""Pauses of the sources of a mixture: a source whose episodes keep failing is left out for some steps."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from mtrl.config.mixture import source_of
from mtrl.errors import RunEndedError
from mtrl.rollout.failures import episode_count, excess, last_failure
from mtrl.types import FAILED, Group

log = logging.getLogger(__name__)

FIRST_PAUSE, LONGEST_PAUSE = 2, 64
"""Number of steps that the first pause of a source skips, and largest number that a pause skips."""


class Pauses:
    """Which sources of a mixture are paused, counted in training steps, so that a resumed run goes on exactly.

    A source has the limits that the run on one task has, for the last groups of its own: more than `max_failed_share`
    of their episodes failed, or every group failed for `MAX_FAILED_ROUNDS` times as many groups. A source beyond a
    limit is paused for the rest of the step and the next `FIRST_PAUSE` steps. Then it is drawn again. Until it has a
    group without a failure, it is judged by its groups since the pause, however few they are, and each further pause is
    twice as long, up to `LONGEST_PAUSE` steps. The last source that is not paused cannot be paused: its limits end the
    run.
    """

    def __init__(self, windows: Mapping[str, int], max_failed_share: float):
        """`windows` has the number of last groups that are judged, for each source with a weight."""
        self.max_failed_share = max_failed_share
        self.step = 0
        """Number of training steps done."""
        self._failures = {name: SourceFailures(window) for name, window in windows.items()}

    @property
    def active(self) -> list[str]:
        """Names of the sources that are not paused, in their order; there is always one."""
        return [name for name, failures in self._failures.items() if failures.until is None]

    def begin_step(self, step: int) -> None:
        """End the pauses that are over when `step` training steps are done."""
        self.step = step
        for name, failures in self._failures.items():
            if failures.until is not None and failures.until <= step:
                failures.until = None
                log.info("environments.%s is tried again in step %d", name, step + 1)

    def note(self, group: Group) -> None:
        """Take a group that was sampled for training, before its replacement is drawn.

        Raises:
            RunEndedError: the source is beyond its limits, and all others are paused.
        """
        name = source_of(str(group.row["id"]))
        source = self._failures.get(name)
        if source is None or source.until is not None:  # the group was drawn before a new weight of 0, or the pause
            return
        failed = [trajectory for trajectory in group.trajectories if trajectory.stop_reason in FAILED]
        source.note(episode_count(group.trajectories), episode_count(failed))
        if not failed or (why := source.excess(self.max_failed_share)) is None:
            return
        if self.active == [name]:
            raise RunEndedError(f"{why}; {last_failure(failed[-1])}")
        source.pause(self.step)
        log.warning(
            "environments.%s is paused: %s; %s. The rows of %s replace its rows, and step %d tries it again; correct "
            "its environment and resume the run, or set environments.%s.weight=0",
            *(name, why, last_failure(failed[-1]), ", ".join(self.active), (source.until or 0) + 1, name),
        )

    def check(self, groups: Sequence[Group]) -> None:
        """Check the groups of an evaluation. A source that was paused, and has had no group without a failure since
        then, does not count, because its failures are known.

        Raises:
            RunEndedError: more than `max_failed_share` of the other episodes failed.
        """
        known = {name for name, source in self._failures.items() if source.pauses}
        counted = [t for group in groups if source_of(str(group.row["id"])) not in known for t in group.trajectories]
        failed = [trajectory for trajectory in counted if trajectory.stop_reason in FAILED]
        shares = episode_count(failed), episode_count(counted)
        if failed and (why := excess(*shares, 0, self.max_failed_share)) is not None:
            raise RunEndedError(f"{why}; {last_failure(failed[-1])}")

    def state(self) -> dict[str, Any]:
        """Return the state for `restore`, as values that can be written as JSON."""
        return {name: failures.state() for name, failures in self._failures.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`, which may lack sources. If all sources would be paused, none is."""
        for name in self._failures.keys() & state.keys():
            self._failures[name].restore(state[name])
        if not self.active:
            for failures in self._failures.values():
                failures.until = None

    def metrics(self) -> dict[str, float]:
        """Return `data/NAME/paused` for each source: 1 if it is paused, else 0."""
        return {f"data/{name}/paused": float(source.until is not None) for name, source in self._failures.items()}


class SourceFailures:
    """Failures of one source, and its pause."""

    def __init__(self, window: int):
        self.recent: deque[tuple[int, int]] = deque(maxlen=window)
        """Number of episodes and of failed episodes of the last groups since the last pause."""
        self.in_a_row = 0
        """Number of groups with a failure since the last group without one."""
        self.pauses = 0
        """Number of pauses since the last group without a failure."""
        self.until: int | None = None
        """Number of training steps done at which the pause ends; None if the source is not paused."""

    def note(self, episodes: int, failed: int) -> None:
        """Count a group."""
        self.recent.append((episodes, failed))
        self.in_a_row = self.in_a_row + 1 if failed else 0
        self.pauses = self.pauses if failed else 0

    def excess(self, max_failed_share: float) -> str | None:
        """Return a clause if the last groups are beyond a limit. After a pause they may be fewer than the window."""
        window = self.recent.maxlen or 1
        if len(self.recent) < window and not self.pauses:
            return None
        episodes, failed = (sum(counts) for counts in zip(*self.recent, strict=True))
        return excess(failed, episodes, self.in_a_row // window, max_failed_share)

    def pause(self, step: int) -> None:
        """Pause the source after `step` training steps."""
        self.until = step + 1 + min(LONGEST_PAUSE, FIRST_PAUSE * 2**self.pauses)
        self.pauses += 1
        self.recent.clear()

    def state(self) -> dict[str, Any]:
        """Return the state for `restore`."""
        return {
            "recent": [list(counts) for counts in self.recent],
            "in_a_row": self.in_a_row,
            "pauses": self.pauses,
            "until": self.until,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`."""
        self.recent.clear()
        self.recent.extend((episodes, failed) for episodes, failed in state["recent"])
        self.in_a_row, self.pauses, self.until = state["in_a_row"], state["pauses"], state["until"]
