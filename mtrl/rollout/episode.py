"""Episodes, and the loop in which the policy and an environment alternate until the episode ends."""

from __future__ import annotations

import asyncio
import copy
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Generic, TypeVar

from mtrl.config.mixture import source_of
from mtrl.engines.base import Engine, EngineLostError, SamplingParams, TurnSampler
from mtrl.environments.base import BaseEnvironment
from mtrl.environments.pool import CallTimeoutError, EnvironmentPool
from mtrl.rollout.conversation import Conversation, Dialogue
from mtrl.rollout.folding import Fold
from mtrl.rollout.stepper import Stepper
from mtrl.types import FAILED, FinishReason, Row, StopReason, Trajectory, Turn
from mtrl.utils.user_code import error_text

log = logging.getLogger(__name__)

SUMMARY_STREAM = 1 << 48
"""Bit of the seed that gives a summary a random stream of its own, apart from those of all turns and attempts."""

Handle = TypeVar("Handle")
"""What an attempt holds at the engine while it runs: the id of its trajectory, or the session of a program."""


@dataclass(frozen=True)
class EpisodeLimits:
    """Limits of one episode: turns, tokens, seconds and retries."""

    max_turns: int
    max_context_length: int
    step_timeout: float
    episode_timeout: float
    retries: int
    max_generate_length: int | None = None
    """Maximum number of sampled tokens per turn; None: the one of the sampling parameters."""


class Occupancy:
    """Measures the time in which at least one thread or task was inside `with occupancy:`.

    Any number of threads or tasks may be inside at once. Around the sampling of turns, `seconds` is the time in which
    at least one turn was being sampled.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock, self._lock = clock, threading.Lock()
        self._inside, self._since, self._total, self._taken = 0, 0.0, 0.0, 0.0

    def __enter__(self) -> Occupancy:
        with self._lock:
            if not self._inside:
                self._since = self._clock()
            self._inside += 1
        return self

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._total += self._clock() - self._since

    @property
    def seconds(self) -> float:
        """Running total in seconds, including an interval that is still open."""
        with self._lock:
            return self._total + (self._clock() - self._since if self._inside else 0.0)

    def take(self) -> float:
        """Return the seconds that were added since the last call of `take`."""
        seconds = self.seconds
        taken, self._taken = seconds - self._taken, seconds
        return taken


class BaseLoop(ABC, Generic[Handle]):
    """Base class of the loops that run episodes. It applies time limits, retries failed attempts and records errors."""

    engine: Engine
    limits: EpisodeLimits
    limits_of_sources: Mapping[str, EpisodeLimits] = {}
    """Limits of each source of a mixture by its name; empty: all rows have `limits`."""
    sampling_clock: Occupancy
    """Clock of the seconds in which at least one turn was being sampled."""

    def limits_of(self, trajectory: Trajectory) -> EpisodeLimits:
        """Return the limits of the episode of a trajectory."""
        if not self.limits_of_sources:
            return self.limits
        return self.limits_of_sources.get(source_of(trajectory.task_id), self.limits)

    async def run(self, row: Row, group_id: str, index: int, sampling: SamplingParams) -> Trajectory:
        """Run one episode; errors and time-outs are retried in a fresh state, and never raised.

        Raises:
            EngineLostError: the engine is lost, so no further episode can run.
        """
        empty = [Trajectory(task_id=str(row["id"]), group_id=group_id, index=index)]
        return (await self._attempts(empty, row, f"{group_id}/{index}", sampling))[0]

    async def run_roles(self, row: Row, group_id: str, index: int, sampling: SamplingParams) -> list[Trajectory]:
        """Run one episode like `run`, and return the trajectories of all roles that are trained: one, except in
        self-play (`mtrl/rollout/self_play.py`)."""
        return [await self.run(row, group_id, index, sampling)]

    async def _attempts(
        self, empty: Sequence[Trajectory], row: Row, name: str, sampling: SamplingParams
    ) -> list[Trajectory]:
        """Run the episode called `name` until an attempt succeeds or none is left. Each attempt fills copies of
        `empty`; return those of the last one."""
        limits = self.limits_of(empty[0])
        if limits.max_generate_length is not None:
            sampling = replace(sampling, max_generate_length=limits.max_generate_length)
        for attempt in range(limits.retries + 1):
            seed = sampling.seed ^ (attempt << 32)
            trajectories = copy.deepcopy(list(empty))
            await self._attempt(trajectories, row, name, replace(sampling, seed=seed))
            if trajectories[0].stop_reason not in FAILED:
                break
            log.info("episode %s, attempt %d failed: %s", name, attempt + 1, trajectories[0].error)
        for trajectory in trajectories:
            trajectory.metrics["attempts"] = attempt + 1
        return trajectories

    async def _attempt(self, trajectories: list[Trajectory], row: Row, name: str, sampling: SamplingParams) -> None:
        async with self._open_trajectory(name, sampling) as handle:
            seconds = self.limits_of(trajectories[0]).episode_timeout
            deadline = asyncio.timeout(seconds)
            try:
                async with deadline:
                    # The episode gets a copy, so that its changes to the row do not reach other episodes.
                    await self._run_trajectories(trajectories, handle, copy.deepcopy(row), sampling)
            except EngineLostError:
                raise
            except Exception as error:
                late = EpisodeTimeoutError(seconds, error) if deadline.expired() else None
                for trajectory in trajectories:
                    fail(trajectory, late or error)

    async def _run_trajectories(
        self, trajectories: list[Trajectory], handle: Handle, row: Row, sampling: SamplingParams
    ) -> None:
        """Run the episode and fill its trajectories, of which only self-play has several."""
        await self._run_episode(trajectories[0], handle, row, sampling)

    @abstractmethod
    def _open_trajectory(self, trajectory_id: str, sampling: SamplingParams) -> AbstractAsyncContextManager[Handle]:
        """Return a context manager that opens an attempt's trajectory at the engine and releases it on exit. The wait
        to enter it does not count towards the episode's time limit."""

    @abstractmethod
    async def _run_episode(self, trajectory: Trajectory, handle: Handle, row: Row, sampling: SamplingParams) -> None:
        """Run the episode and fill the trajectory; an exception other than `EngineLostError` fails the attempt."""

    @abstractmethod
    async def close(self) -> None:
        """Close the resources that the episodes share, except the engine."""


@dataclass
class EpisodeLoop(BaseLoop[str]):
    """Loop of the episodes in which an environment answers the policy; all episodes of a run share it."""

    engine: Engine
    make_environment: Callable[[], BaseEnvironment]
    make_conversation: Callable[..., Dialogue]
    """Factory that takes the opening messages, and the tools if there are any."""
    pool: EnvironmentPool
    limits: EpisodeLimits
    sampling_clock: Occupancy = field(default_factory=Occupancy)
    """Clock of the seconds in which at least one turn was being sampled."""
    fold: Fold | None = field(kw_only=True, default=None)
    """Fold of long contexts; None: an episode ends when its context is full."""

    async def close(self) -> None:
        """End the idle threads."""
        self.pool.close()

    @asynccontextmanager
    async def _open_trajectory(self, trajectory_id: str, sampling: SamplingParams) -> AsyncIterator[str]:
        self.engine.open(trajectory_id)
        try:
            yield trajectory_id
        finally:
            self.engine.release(trajectory_id)

    async def _run_episode(
        self, trajectory: Trajectory, trajectory_id: str, row: Row, sampling: SamplingParams
    ) -> None:
        limits = self.limits_of(trajectory)
        call = partial(self.pool.call, timeout=limits.step_timeout)
        stepper = Stepper(self.make_environment, call, trajectory, row, limits.max_turns)
        try:
            prompt = await stepper.open()
            offered = (stepper.tools,) if stepper.tools else ()
            conversation = self.make_conversation(prompt, *offered)
            trajectory.turns = conversation.turns
            trajectory.stop_reason = StopReason.MAX_TURNS
            for turn_index in range(limits.max_turns):
                # Every turn has its own random stream, so that a repeated context does not repeat the same tokens.
                turn_sampling = replace(sampling, seed=(sampling.seed + turn_index) % 2**64)
                if await self._turn(stepper, trajectory_id, conversation, turn_sampling):
                    break
        finally:
            await stepper.close(self.pool, limits.step_timeout)

    async def _turn(
        self, stepper: Stepper, trajectory_id: str, conversation: Dialogue, sampling: SamplingParams
    ) -> bool:
        """Run one turn; return True if the episode is over (`stop_reason` holds the reason)."""
        turn = await self._sample(self.engine, stepper, trajectory_id, conversation, sampling)
        if turn is None:
            return True
        _, observation = await stepper.take(turn)
        if not stepper.over:
            conversation.add_observation(observation)
        return stepper.over

    async def _sample(
        self,
        engine: TurnSampler,
        stepper: Stepper,
        trajectory_id: str,
        conversation: Dialogue,
        sampling: SamplingParams,
    ) -> Turn | None:
        """Sample the next turn of a conversation, after a fold of its context if one is due; None if the episode is
        over instead (`stop_reason` holds the reason)."""
        sample = partial(self._sample_as_it_is, engine, stepper, trajectory_id, conversation)
        if self.fold is not None and conversation.turns and conversation.prompt_tokens >= self.fold.threshold:
            assert isinstance(conversation, Conversation)
            own_stream = replace(sampling, seed=sampling.seed ^ SUMMARY_STREAM)
            if not await self.fold.apply(conversation, partial(sample, own_stream)):
                return None
        return await sample(sampling)

    async def _sample_as_it_is(
        self,
        engine: TurnSampler,
        stepper: Stepper,
        trajectory_id: str,
        conversation: Dialogue,
        sampling: SamplingParams,
    ) -> Turn | None:
        """Like `_sample`, without a fold."""
        trajectory = stepper.trajectory
        context = self.limits_of(trajectory).max_context_length
        room = context - conversation.prompt_tokens
        if room <= 0:
            if not trajectory.turns:
                raise PromptTooLongError(conversation.prompt_tokens, context)
            trajectory.stop_reason = StopReason.CONTEXT_LIMIT
            await stepper.truncate()
            return None
        # The engine applies the limit of the run, and that of a source of a mixture may be lower.
        sampling = replace(sampling, max_generate_length=min(sampling.max_generate_length, room))
        start = time.perf_counter()
        with self.sampling_clock:
            generation = await engine.generate(trajectory_id, conversation.prompt, sampling)
        if generation.finish == FinishReason.ABORT:
            trajectory.stop_reason, trajectory.trainable = StopReason.ABORTED, False
            return None
        turn: Turn = _parsed(conversation, generation)
        turn.seconds_generate = time.perf_counter() - start
        return turn


class EpisodeTimeoutError(TimeoutError):
    """The whole episode took too long."""

    def __init__(self, seconds: float, where: Exception):
        super().__init__(f"the episode took longer than environment.episode_timeout={seconds} s")
        self.__cause__ = where


class PromptTooLongError(ValueError):
    """The first prompt leaves no room for a single token."""

    def __init__(self, tokens: int, limit: int):
        super().__init__(
            f"the prompt has {tokens} tokens but generator.max_context_length is {limit}; raise it or leave the row out"
        )


class ResponseParseError(ValueError):
    """The renderer could not parse the sampled ids into a message."""


def _parsed(conversation: Dialogue, generation: Any) -> Any:
    try:
        return conversation.add_action(generation)
    except Exception as error:
        raise ResponseParseError(f"the renderer could not parse {generation.token_ids[:20]}…") from error


def fail(trajectory: Trajectory, error: Exception) -> None:
    """Set the stop reason of a failed trajectory and its error: the cause in one line, then the traceback."""
    trajectory.trainable = False
    trajectory.stop_reason = StopReason.ENV_ERROR
    if isinstance(error, EpisodeTimeoutError | CallTimeoutError):
        trajectory.stop_reason = StopReason.TIMEOUT
    elif isinstance(error, ResponseParseError):
        trajectory.stop_reason = StopReason.PARSE_ERROR
    trajectory.error = error_text(error)
