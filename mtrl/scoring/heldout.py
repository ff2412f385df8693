"""Held-out evaluation during a run. It uses the episode loop of training, the family's scorer, fixed rows and its own
sampling parameters."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

from mtrl.config.schema import EvaluationConfig
from mtrl.engines.base import SamplingParams
from mtrl.environments.family import Family
from mtrl.environments.pool import CallTimeoutError, EnvironmentPool
from mtrl.errors import RunEndedError, UserError
from mtrl.rollout.rollouts import Rollouts
from mtrl.scoring.measures import val_metrics
from mtrl.scoring.sources import val_metrics_of_sources
from mtrl.types import Group, Row, Trajectory
from mtrl.utils.plain_numbers import finite
from mtrl.utils.process import usable_cores
from mtrl.utils.user_code import reason


async def score_groups(family: Family, groups: Sequence[Group], seconds: float) -> None:
    """Set the score of every trajectory, and whether it holds an answer if the family can tell.

    A trajectory without a turn scores 0 and holds no answer. A scorer that waits for processes is called on one thread
    per core, any other scorer on a single thread.

    Args:
        seconds: time limit of scoring one trajectory, in seconds (`environment.episode_timeout`).

    Raises:
        RunEndedError: the scorer fails, hangs, or returns no finite number.
    """
    pool = _threads(usable_cores() if family.waits_for_processes else 1)
    await asyncio.gather(*(_score(pool, family, t, group.row, seconds) for group in groups for t in group.trajectories))


async def _score(pool: EnvironmentPool, family: Family, trajectory: Trajectory, row: Row, seconds: float) -> None:
    score, answered = 0.0, None if family.answered is None else False
    if trajectory.turns:
        who = f"the scorer of {family.name}, on row {trajectory.task_id},"
        try:
            score, answered = await pool.call(partial(_judged, family, trajectory, row), timeout=seconds)
        except CallTimeoutError:
            raise RunEndedError(
                f"{who} took longer than environment.episode_timeout={seconds:g} s; fix `score`, or raise it"
            ) from None
        except UserError:
            raise
        except Exception as error:  # the scorer is the user's
            raise RunEndedError(f"{who} failed: {reason(error)}; fix `score` or `answered`") from error
    trajectory.score = score
    if answered is not None:
        trajectory.answered = answered


def _judged(family: Family, trajectory: Trajectory, row: Row) -> tuple[float, bool | None]:
    trajectory = trajectory.without_summaries()
    # The scorer gets a copy of the row, since its changes must not reach later episodes.
    score = finite(family.score(trajectory, copy.deepcopy(row)), "it returned")
    answered = None if family.answered is None else family.answered(trajectory, copy.deepcopy(row))
    return score, None if answered is None else bool(answered)


@cache
def _threads(count: int) -> EnvironmentPool:
    """Return the shared thread pool. With more threads than cores, the processes of a scorer could exceed their time
    limits."""
    return EnvironmentPool(count)


@dataclass
class EvaluationReport:
    """Metrics and trajectories of one evaluation."""

    metrics: dict[str, float]
    groups: dict[str, list[Group]]
    """Groups by kind: greedy, sampled."""

    def ends(self) -> tuple[Trajectory, Trajectory]:
        """Return a greedy trajectory of the highest reward and one of the lowest reward."""
        greedy = [t for group in self.groups["greedy"] for t in group.trajectories]
        return max(greedy, key=lambda t: t.reward), min(greedy, key=lambda t: t.reward)


@dataclass
class HeldOut:
    """Evaluates the engine's current weights on the first `rows` held-out rows."""

    config: EvaluationConfig
    family: Family
    rows: list[Row]
    rollouts: Rollouts
    judge: Callable[[Sequence[Group]], Awaitable[None]]
    """Rewards and scores groups, in place."""
    sampling: SamplingParams
    """Sampling parameters of evaluations; greedy episodes set temperature 0."""
    sources: Sequence[str] = ()
    """Names of the sources of a mixture, which have metrics of their own."""

    @property
    def episodes(self) -> int:
        """Number of episodes of one evaluation."""
        greedy, sampled = len(self.rows[: self.config.rows]), len(self.rows[: self.config.sampled_rows])
        return greedy + sampled * self.config.samples_per_row

    async def run(self, step: int, on_episode: Callable[[Trajectory], None] = lambda _: None) -> EvaluationReport:
        """Run greedy episodes, then sampled ones if `sampled_rows` is not 0. `on_episode` is called after each episode.

        `val/success/*`, `val/reward/mean` and `val/turns/mean` come from the greedy episodes; `val/success/sampled` and
        `val/*/pass_k_*` come from the sampled ones (pass@1 from the greedy ones if there are none).
        """
        config, rollouts = self.config, replace(self.rollouts, on_episode=on_episode)
        greedy = replace(self.sampling, temperature=0.0)
        groups = {"greedy": await self._collect(rollouts, f"eval{step}/greedy", self.rows[: config.rows], 1, greedy)}
        if config.sampled_rows:
            rows = self.rows[: config.sampled_rows]
            groups["sampled"] = await self._collect(
                rollouts, f"eval{step}/sampled", rows, config.samples_per_row, self.sampling
            )
        return EvaluationReport(self.metrics(groups), groups)

    def metrics(self, groups: dict[str, list[Group]]) -> dict[str, float]:
        """Return the metrics `val/…` of scored groups by kind; `sampled` may be missing. In a mixture `val/SOURCE/…`
        are those of one source."""
        own = val_metrics_of_sources(groups, self.sources, self.config, self.family)
        return val_metrics(groups, self.config, self.family) | own

    async def _collect(
        self, rollouts: Rollouts, key: str, rows: list[Row], samples: int, sampling: SamplingParams
    ) -> list[Group]:
        report = await rollouts.collect(key, rows, samples, sampling)
        await self.judge(report.groups)
        return report.groups
