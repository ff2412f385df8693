"""Rollouts of an evaluation: every model runs the same rows, with the episode loop, the reward and the scorer of
training."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from mtrl.config.schema import Config, EvaluationConfig
from mtrl.console.console import Console
from mtrl.console.progress import Work
from mtrl.engines.base import SamplingParams
from mtrl.engines.endpoints.budget import Budget
from mtrl.environments.family import Family
from mtrl.evaluation.ready_models import ReadyModel, batch_size_of
from mtrl.evaluation.rollouts import ModelRollouts, Source
from mtrl.evaluation.store import Store, group_name
from mtrl.rewards.compose import RewardComposer
from mtrl.rewards.mixture import make_composer
from mtrl.rollout.rollouts import Rollouts
from mtrl.scoring.heldout import score_groups
from mtrl.types import FAILED, Group, Row, Trajectory

T = TypeVar("T")

ALL_FAILED = 10
"""Number of episodes that end an evaluation if all of them failed, however many are still to run."""


class TooManyFailedError(RuntimeError):
    """More episodes failed than `environment.max_failed_share` allows."""


@dataclass(frozen=True)
class Kind:
    """One kind of episodes, such as greedy or sampled, and its rows."""

    name: str
    rows: list[Row]
    samples: int
    """Number of trajectories per row."""
    is_greedy: bool

    @property
    def episodes(self) -> int:
        return len(self.rows) * self.samples

    def sampling(self, sampling: SamplingParams) -> SamplingParams:
        return replace(sampling, temperature=0.0) if self.is_greedy else sampling


def kinds_of(config: EvaluationConfig, rows: Sequence[Row]) -> list[Kind]:
    """Return the kinds: greedy over `rows`, and sampled over `sampled_rows`, each if it has rows."""
    greedy = Kind("greedy", list(rows[: config.rows]), 1, is_greedy=True)
    sampled = Kind("sampled", list(rows[: config.sampled_rows]), config.samples_per_row, is_greedy=False)
    return [kind for kind in (greedy, sampled) if kind.rows]


@dataclass
class FailureLimit:
    """Limit of failed episodes."""

    planned: int
    """Number of episodes of the evaluation."""
    share: float
    """Share of them that may fail."""
    episodes: int = 0
    failed: int = 0

    def note(self, trajectories: Iterable[Trajectory], label: str) -> None:
        """Count trajectories and failures.

        Raises:
            TooManyFailedError: Too many episodes have failed.
        """
        for trajectory in trajectories:
            self.episodes += 1
            if trajectory.stop_reason in FAILED:
                self.failed += 1
                all_failed = self.failed == self.episodes >= min(ALL_FAILED, self.planned) and self.share < 1
                if self.failed > self.share * self.planned or all_failed:
                    cause = (trajectory.error or trajectory.stop_reason).partition("\n")[0]
                    raise TooManyFailedError(
                        f"{label}: {self.failed} of {self.episodes} episodes failed, and of {self.planned} episodes "
                        f"environment.max_failed_share={self.share} may fail; the last cause: {cause}"
                    )


@dataclass
class EpisodeProgress:
    """The finished and the missing episodes of one model, of one kind."""

    kind: Kind
    done: dict[int, Group]
    """Whole groups, by the index of their row."""
    missing: list[list[int]]
    """Lists of row indices. The rows of a list run concurrently, one list after the other."""

    @property
    def groups(self) -> list[Group]:
        return [group for _, group in sorted(self.done.items())]


@dataclass
class EvaluationRunner:
    """Runs the episodes of every model with resources that all models share."""

    config: Config
    family: Family
    kinds: list[Kind]
    store: Store
    budget: Budget
    """Budget of all endpoints, with one account per model."""
    console: Console
    composer: RewardComposer = field(init=False)

    def __post_init__(self) -> None:
        self.composer = make_composer(self.config)

    async def run(self, source: Source, load: Callable[[], ReadyModel], whole: Work) -> ModelRollouts:
        """Return all episodes of one model. Stored episodes are read, and no model is loaded if all are stored. Once
        the budget of the endpoints is spent, the episodes that it did not cover are left out.

        Raises:
            TooManyFailedError, UserError: The evaluation cannot continue. Finished episodes are in the store.
        """
        batch_size = batch_size_of(source, self.config)
        states = [self._progress(source.label, kind, batch_size) for kind in self.kinds]
        for state in states:
            whole.advance(len(state.done) * state.kind.samples)
        if any(state.missing for state in states):
            model = load()
            try:
                for state in states:
                    if state.missing and not self._is_budget_spent(source):
                        await self._finish(model, state, whole)
            finally:
                await model.close()
            if not self._is_budget_spent(source):
                self.composer.check()
        groups = {state.kind.name: state.groups for state in states}
        usage = self.budget.spending[source.label].metrics(self.budget.price) if source.kind == "endpoint" else {}
        return ModelRollouts(source.label, source, groups, usage)

    def _is_budget_spent(self, source: Source) -> bool:
        return source.kind == "endpoint" and self.budget.closed is not None

    def _progress(self, label: str, kind: Kind, batch_size: int | None) -> EpisodeProgress:
        done = self.store.read(label, kind.name, kind.rows, kind.samples)
        batches = fixed_batches(len(kind.rows), kind.samples, batch_size)
        missing = [places for places in batches if not all(place in done for place in places)]
        again = {place for places in missing for place in places}
        complete = {place: group for place, group in done.items() if place not in again}
        return EpisodeProgress(kind, complete, missing if batch_size else [sorted(again)] if again else [])

    async def _finish(self, model: ReadyModel, state: EpisodeProgress, whole: Work) -> None:
        """Run the missing episodes."""
        label, kind, done = model.source.label, state.kind, state.done
        self.store.replace(label, kind.name, done)
        limit = FailureLimit(kind.episodes, self.config.environment.max_failed_share)
        with self.console.progress(f"{label}, {kind.name}", kind.episodes) as bar:
            bar.advance(len(done) * kind.samples)

            async def one(place: int) -> None:
                group = await self._group(model, kind, place)
                if self._is_budget_spent(model.source) and any(t.stop_reason in FAILED for t in group.trajectories):
                    return  # other groups may still receive responses to earlier requests
                done[place] = group
                self.store.append(label, kind.name, group)
                bar.advance(kind.samples)
                whole.advance(kind.samples)
                if model.refused is not None and not self._is_budget_spent(model.source):
                    raise model.refused
                limit.note(group.trajectories, label)

            for places in state.missing:
                await all_at_once(one(place) for place in places)
        self.store.replace(label, kind.name, done)

    async def _group(self, model: ReadyModel, kind: Kind, place: int) -> Group:
        """Run, reward and score one group. A failed episode gets no score, because it says
        nothing about the model."""
        rollouts = Rollouts(model.loop, self.config.seed, self.config.environment.max_failed_share)
        sampling = kind.sampling(model.sampling)
        group = await rollouts.group(group_name(kind.name, place), kind.rows[place], kind.samples, sampling)
        await self.composer.apply_async(group)
        await score_groups(self.family, [group], self.config.environment.episode_timeout)
        for trajectory in group.trajectories:
            if trajectory.stop_reason in FAILED:
                trajectory.score = trajectory.answered = None
        return group


def fixed_batches(rows: int, samples: int, trajectories: int | None) -> list[list[int]]:
    """Split the row indices into lists that run together. With `trajectories`, a list has as many rows as fill the
    engine; otherwise each row is a list of its own."""
    size = max(1, trajectories // samples) if trajectories else 1
    return [list(range(start, min(start + size, rows))) for start in range(0, rows, size)]


async def all_at_once(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines concurrently. The first error cancels the others and is raised."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
