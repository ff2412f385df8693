"""Limits on failed episodes, and the sentences about them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from mtrl.types import Trajectory

MAX_FAILED_ROUNDS = 10
"""Number of consecutive rounds of replacements without one complete group after which the run ends, however many
failures are allowed."""


def episode_count(trajectories: Iterable[Trajectory]) -> int:
    """Return the number of episodes that gave these trajectories. In self-play an episode gives one for each trained
    role; a group with a failed trajectory of each role then has one failed episode."""
    roles: defaultdict[str, Counter[str | None]] = defaultdict(Counter)
    for trajectory in trajectories:
        roles[trajectory.group_id][trajectory.role] += 1
    return sum(max(counts.values()) for counts in roles.values())


def excess(failed: int, episodes: int, failed_rounds: int, max_failed_share: float) -> str | None:
    """Return a clause if more than `max_failed_share` of the episodes failed, or if every group failed in at least
    `MAX_FAILED_ROUNDS` consecutive rounds (`failed_rounds` is the number of such rounds); else None."""
    counted = f"{failed} of {episodes} episodes failed"
    if failed / episodes > max_failed_share:
        return f"{counted}, more than environment.max_failed_share={max_failed_share} allows"
    if failed_rounds >= MAX_FAILED_ROUNDS:
        return f"{counted}, and none of the last {failed_rounds} rounds of replacements had a group without a failure"
    return None


def last_failure(newest: Trajectory) -> str:
    """Return a clause with the cause of the latest failure and the place of its traceback."""
    return f"the last failure was: {cause(newest)} (its traceback is in run.log)"


def summary(failures: Sequence[Trajectory], episodes: int, newest: Trajectory) -> str:
    """Return one line that reports the failed episodes."""
    return f"{episode_count(failures)} of {episodes} episodes failed: {cause(newest)}"


def cause(failure: Trajectory) -> str:
    """Return the first line of a failed trajectory's error, or its stop reason if it has no error."""
    return (failure.error or failure.stop_reason).partition("\n")[0]
