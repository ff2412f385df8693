"""Episodes that programs run: the policy answers their calls over HTTP, and its answers become a trajectory."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import cast

from mtrl.agents.callable import CallableRunner
from mtrl.agents.program import ProgramRunner
from mtrl.agents.remote import RemoteRunner
from mtrl.agents.runner import AgentError, AgentRunner, Assignment, ProgramResult
from mtrl.agents.slots import Slots
from mtrl.config.engine_schema import AgentConfig
from mtrl.engines.base import Engine, EngineLostError, SamplingParams
from mtrl.gateway.exchange import RequestError
from mtrl.gateway.server import MODEL, Gateway
from mtrl.gateway.session import Session
from mtrl.rollout.episode import BaseLoop, EpisodeLimits, Occupancy, ResponseParseError
from mtrl.types import Generation, Row, StopReason, Trajectory
from mtrl.utils.user_code import load_function

SECONDS_FOR_REWARD = 10.0
"""Seconds in which a program must report its reward after it has reported the end of its episode: the managed service's
SDK first completes the rollout and then reports the reward."""


class MissingRewardError(AgentError):
    """A program ended by itself and reported no reward."""


@dataclass
class AgentLoop(BaseLoop[Session]):
    """Loop of the episodes in which a program calls the policy; all episodes of a run share it."""

    gateway: Gateway
    runner: AgentRunner
    limits: EpisodeLimits
    max_concurrent: int
    sampling_clock: Occupancy = field(default_factory=Occupancy)
    """Clock of the seconds in which at least one turn was being sampled."""

    def __post_init__(self) -> None:
        self.engine: Engine = self.gateway.engine
        self.gateway.engine = cast(Engine, TimedEngine(self.engine, self.sampling_clock))
        self._slots: Slots[Session] = Slots(self.max_concurrent)
        self._starting: asyncio.Task[None] | None = None

    async def run(self, row: Row, group_id: str, index: int, sampling: SamplingParams) -> Trajectory:
        """Run one episode, once fewer than `max_concurrent` others are running.

        Raises:
            EngineLostError: the engine is lost, so no further episode can run.
            UserError: the gateway cannot listen on its address.
        """
        await self._start()
        return await super().run(row, group_id, index, sampling)

    async def close(self) -> None:
        """Close the runner and then the gateway."""
        try:
            await self.runner.close()
        finally:
            await self.gateway.close()

    async def _start(self) -> None:
        """Start the gateway once. All episodes that wait for it continue at the same moment, in their order."""
        loop = asyncio.get_running_loop()
        if self._starting is None or self._starting.get_loop() is not loop:
            self._starting = loop.create_task(self.gateway.start())
        await asyncio.shield(self._starting)

    def _open_trajectory(self, trajectory_id: str, sampling: SamplingParams) -> AbstractAsyncContextManager[Session]:
        return self._slots.take(partial(self.gateway.open, trajectory_id, sampling), self.gateway.close_session)

    async def _run_episode(self, trajectory: Trajectory, session: Session, row: Row, sampling: SamplingParams) -> None:
        problem: Exception | None = None
        try:
            outcome = await self._outcome(session, self._assignment(session, row, sampling))
            if outcome is not None:
                _set_rewards(session, outcome)
                trajectory.metrics |= outcome.metrics
            problem = _reported_failure(session, outcome)
        except EngineLostError:
            raise
        except Exception as error:
            problem = error
        finally:
            trajectory.turns = session.turns()
            trajectory.metrics |= {name: float(count) for name, count in session.metrics.items()}
        if problem is not None and problem.__cause__ is None:
            problem.__cause__ = session.failure
        self._set_stop_reason(trajectory, session, problem)

    def _set_stop_reason(self, trajectory: Trajectory, session: Session, problem: Exception | None) -> None:
        """Set the trajectory's stop reason.

        Raises:
            Exception: the episode failed.
        """
        if session.stop_reason == StopReason.PARSE_ERROR:
            raise ResponseParseError("the sampled tokens cannot be parsed into a message") from session.failure
        if session.stop_reason == StopReason.ABORTED:
            trajectory.stop_reason, trajectory.trainable = StopReason.ABORTED, False
        elif not trajectory.turns:
            raise _no_answer_error(session, problem, f"{self.gateway.url}/trajectories/TOKEN/v1")
        elif session.stop_reason is not None:  # a refused call is the reason, whatever the program did afterwards
            trajectory.stop_reason = session.stop_reason
        elif problem is not None:
            raise problem
        else:
            trajectory.stop_reason = StopReason.DONE

    async def _outcome(self, session: Session, assignment: Assignment) -> ProgramResult | None:
        """Run the program until it ends, and return its outcome.

        Raises:
            EngineLostError: the engine is lost, so the program would wait forever.
        """
        running = asyncio.ensure_future(self._until_ended(session, assignment))
        finished = asyncio.ensure_future(session.finished.wait())
        try:
            await asyncio.wait((running, finished), return_when=asyncio.FIRST_COMPLETED)
            # A program may report the end of its episode before it cleans up.
            if not isinstance(session.failure, EngineLostError):
                await asyncio.wait((running,))
        finally:
            for task in (running, finished):
                task.cancel()
            await asyncio.wait((running, finished))  # until the program has ended
        if isinstance(session.failure, EngineLostError):
            raise session.failure
        return running.result()

    async def _until_ended(self, session: Session, assignment: Assignment) -> ProgramResult | None:
        outcome = await self.runner.run(assignment)
        if outcome is None and self.runner.ends_by_report:
            await session.finished.wait()
            with suppress(TimeoutError):
                async with asyncio.timeout(SECONDS_FOR_REWARD):
                    await session.rewards_reported.wait()
        return outcome

    def _assignment(self, session: Session, row: Row, sampling: SamplingParams) -> Assignment:
        return Assignment(
            row=row,
            base_url=self.gateway.base_url(session),
            api_key=session.token,
            model=MODEL,
            trajectory_id=session.name,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            max_tokens=sampling.max_generate_length,
            feedback_url=self.gateway.trajectory_url(session),
        )


@dataclass
class TimedEngine:
    """Wrapper around the engine of the sessions that measures when turns are being sampled."""

    engine: Engine
    sampling_clock: Occupancy

    def open(self, trajectory_id: str) -> None:
        self.engine.open(trajectory_id)

    async def generate(self, trajectory_id: str, prompt: list[int], sampling: SamplingParams) -> Generation:
        with self.sampling_clock:
            return await self.engine.generate(trajectory_id, prompt, sampling)

    def release(self, trajectory_id: str) -> None:
        self.engine.release(trajectory_id)


def make_runner(agent: AgentConfig) -> AgentRunner:
    """Create the runner of the configured agent.

    Raises:
        UserError: the function cannot be imported, or the agent at `url` does not answer.
    """
    if agent.target is not None:
        return CallableRunner(load_function(agent.target, "generator.agent.target"), agent.max_concurrent)
    if agent.command is not None:
        return ProgramRunner(agent.command, agent.env, agent.max_concurrent, agent.pass_env)
    assert agent.url is not None, "generator.agent names no program"
    return RemoteRunner(agent.url, agent.api_key_env)


def _set_rewards(session: Session, outcome: ProgramResult) -> None:
    """Pass the outcome's rewards, if any, to the session.

    Raises:
        AgentError: the session refuses the rewards, for example because they are not one per call.
    """
    if outcome.rewards is None:
        return
    try:
        session.set_rewards(outcome.rewards)
    except RequestError as error:
        raise AgentError(f"the program's rewards do not fit: {error.message}") from None


def _reported_failure(session: Session, outcome: ProgramResult | None) -> AgentError | None:
    """Return the error of a program that has ended by itself: a failure that it reported, or a missing reward."""
    reported = outcome.error if outcome is not None and outcome.error else session.error
    if reported or session.status == "failed":
        return AgentError(reported or "the program reported that it failed")
    if session.rewards is None:
        return MissingRewardError(
            "the program ended without a reward; let it return one, write it to MTRL_RESULT or report it to "
            "/update-reward"
        )
    return None


def _no_answer_error(session: Session, problem: Exception | None, url: str) -> AgentError:
    """Return the error of a program none of whose calls was answered."""
    if session.stop_reason is not None or session.failure is not None:
        message = "no call of the program was answered"
    else:
        message = f"the program never called the model at {url}"
    if problem is not None and not isinstance(problem, MissingRewardError):
        message += f" ({type(problem).__name__}: {next(iter(str(problem).splitlines()), '')})"
    elif session.stop_reason == StopReason.CONTEXT_LIMIT:
        message += " (its first prompt does not fit generator.max_context_length)"
    error = AgentError(message)
    error.__cause__ = problem or session.failure
    return error
