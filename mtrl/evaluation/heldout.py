"""Held-out evaluation during a run. It uses the episode loop of training, the family's scorer, fixed rows and its own
sampling parameters."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial

from mtrl.config.schema import EvaluationConfig
from mtrl.environments.family import Family
from mtrl.evaluation.measures import val_metrics
from mtrl.generator.engines.base import SamplingParams
from mtrl.generator.rollouts import Rollouts
from mtrl.types import Group, Row, Trajectory


async def score_groups(family: Family, groups: Sequence[Group]) -> None:
    """Set the score of every trajectory, and whether it holds an answer if the family can tell. A trajectory without a
    turn scores 0 and holds no answer. A scorer that waits for processes is called on one thread per core."""
    scored = [partial(_score, family, t, group.row) for group in groups for t in group.trajectories]
    if family.waits_for_processes:
        loop = asyncio.get_running_loop()
        await asyncio.gather(*(loop.run_in_executor(_threads(), score) for score in scored))
    else:
        for score in scored:
            score()


def _score(family: Family, trajectory: Trajectory, row: Row) -> None:
    trajectory.score = float(family.score(trajectory, row)) if trajectory.turns else 0.0
    if family.answered is not None:
        trajectory.answered = bool(trajectory.turns) and bool(family.answered(trajectory, row))


@cache
def _threads() -> ThreadPoolExecutor:
    """Return the shared thread pool. With more threads than cores, the processes of a scorer could exceed their time
    limits."""
    return ThreadPoolExecutor(os.cpu_count(), "scorer")


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

    async def run(self, step: int) -> EvaluationReport:
        """Run greedy episodes, then sampled ones if `sampled_rows` is not 0.

        `val/success/*`, `val/reward/mean` and `val/turns/mean` come from the greedy episodes; `val/success/sampled` and
        `val/*/pass_k_*` come from the sampled ones (pass@1 from the greedy ones if there are none).
        """
        config = self.config
        groups = {
            "greedy": await self._play(
                f"eval{step}/greedy", self.rows[: config.rows], 1, replace(self.sampling, temperature=0.0)
            )
        }
        if config.sampled_rows:
            groups["sampled"] = await self._play(
                f"eval{step}/sampled", self.rows[: config.sampled_rows], config.samples_per_row, self.sampling
            )
        return EvaluationReport(self.metrics(groups), groups)

    def metrics(self, groups: dict[str, list[Group]]) -> dict[str, float]:
        """Return the metrics `val/…` of scored groups by kind; `sampled` may be missing."""
        return val_metrics(groups, self.config, self.family)

    async def _play(self, key: str, rows: list[Row], samples: int, sampling: SamplingParams) -> list[Group]:
        report = await self.rollouts.collect(key, rows, samples, sampling)
        await self.judge(report.groups)
        return report.groups
