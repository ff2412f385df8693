"""Held-out evaluation during a run: the same episode loop, the family's scorer, fixed rows, its own sampling."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from mtrl.config.schema import EvaluationConfig
from mtrl.environments.family import Family
from mtrl.evaluation.measures import val_metrics
from mtrl.generator.engines.base import SamplingParams
from mtrl.generator.rollouts import Rollouts
from mtrl.types import Group, Row, Trajectory


def score_group(family: Family, group: Group) -> None:
    """Let the scorer judge every trajectory, and the family say whether it holds an answer; one without a turn scores 0
    and holds none."""
    for trajectory in group.trajectories:
        trajectory.score = float(family.score(trajectory, group.row)) if trajectory.turns else 0.0
        if family.answered is not None:
            trajectory.answered = bool(trajectory.turns) and bool(family.answered(trajectory, group.row))


@dataclass
class EvaluationReport:
    """Numbers and trajectories of one evaluation."""

    metrics: dict[str, float]
    groups: dict[str, list[Group]]
    """By kind: greedy, sampled."""

    def ends(self) -> tuple[Trajectory, Trajectory]:
        """A trajectory of the highest and one of the lowest reward."""
        greedy = [t for group in self.groups["greedy"] for t in group.trajectories]
        return max(greedy, key=lambda t: t.reward), min(greedy, key=lambda t: t.reward)


@dataclass
class HeldOut:
    """Evaluates the engine's current weights on the first `rows` held-out rows."""

    config: EvaluationConfig
    family: Family
    rows: list[Row]
    rollouts: Rollouts
    judge: Callable[[Group], Awaitable[None]]
    """Pays and scores a group, in place."""
    sampling: SamplingParams
    """Of evaluations; greedy ones set temperature 0."""

    async def run(self, step: int) -> EvaluationReport:
        """Greedy, then sampled where `sampled_rows` asks for it.

        `val/success/*`, `val/reward/mean` and `val/turns/mean` are greedy; `val/success/sampled`, `val/*/pass_k_*` come
        from the sampled episodes (pass@1 from the greedy ones where there are none).
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
        """The `val/…` of groups that were played and scored; `sampled` may be left out."""
        return val_metrics(groups, self.config, self.family)

    async def _play(self, key: str, rows: list[Row], samples: int, sampling: SamplingParams) -> list[Group]:
        report = await self.rollouts.collect(key, rows, samples, sampling)
        for group in report.groups:
            await self.judge(group)
        return report.groups
