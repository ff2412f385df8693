"""Episodes that programs play: the policy answers them over HTTP, and what it says becomes a trajectory."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import cast

from mtrl.gateway.errors import RequestError
from mtrl.gateway.server import MODEL, Gateway
from mtrl.gateway.session import Session
from mtrl.generator.agents.runner import AgentError, Assignment, Outcome, Runner
from mtrl.generator.agents.slots import Slots
from mtrl.generator.engines.base import Engine, EngineLostError, Generation, SamplingParams
from mtrl.generator.episode import Episodes, Limits, ResponseParseError
from mtrl.generator.occupancy import Occupancy
from mtrl.types import Row, StopReason, Trajectory

LATE_REPORT = 10.0
"""Seconds in which a program that says that its episode is over has to say what it is paid: the managed service's SDK
completes first and pays then."""


class UnpaidError(AgentError):
    """A program ended by itself and did not say what it is paid."""


@dataclass
class AgentLoop(Episodes[Session]):
    """Everything that the episodes of a run share in which a program decides what is said to the policy."""

    gateway: Gateway
    runner: Runner
    limits: Limits
    max_concurrent: int
    sampling: Occupancy = field(default_factory=Occupancy)
    """When turns were sampled."""

    def __post_init__(self) -> None:
        self.engine: Engine = self.gateway.engine
        self.gateway.engine = cast(Engine, Watched(self.engine, self.sampling))
        self._slots: Slots[Session] = Slots(self.max_concurrent)
        self._starting: asyncio.Task[None] | None = None

    async def run(self, row: Row, group_id: str, index: int, sampling: SamplingParams) -> Trajectory:
        """Play one episode, once fewer than `max_concurrent` others are played.

        Raises:
            EngineLostError: no episode can be played any more.
            UserError: the gateway's address cannot be had.
        """
        await self._start()
        return await super().run(row, group_id, index, sampling)

    async def close(self) -> None:
        """End the programs and the gateway."""
        try:
            await self.runner.close()
        finally:
            await self.gateway.close()

    async def _start(self) -> None:
        """All that wait for the gateway go on at the same moment, in their order."""
        loop = asyncio.get_running_loop()
        if self._starting is None or self._starting.get_loop() is not loop:
            self._starting = loop.create_task(self.gateway.start())
        await asyncio.shield(self._starting)

    def _seat(self, trajectory_id: str, sampling: SamplingParams) -> AbstractAsyncContextManager[Session]:
        return self._slots.take(partial(self.gateway.open, trajectory_id, sampling), self.gateway.close_session)

    async def _play(self, trajectory: Trajectory, session: Session, row: Row, sampling: SamplingParams) -> None:
        problem: Exception | None = None
        try:
            outcome = await self._outcome(session, self._assignment(session, row, sampling))
            if outcome is not None:
                _pay(session, outcome)
                trajectory.metrics |= outcome.metrics
            problem = _unsaid(session, outcome)
        except EngineLostError:
            raise
        except Exception as error:
            problem = error
        finally:
            trajectory.turns = session.turns()
            trajectory.metrics |= {name: float(count) for name, count in session.metrics.items()}
        if problem is not None and problem.__cause__ is None:
            problem.__cause__ = session.failure
        self._judge(trajectory, session, problem)

    def _judge(self, trajectory: Trajectory, session: Session, problem: Exception | None) -> None:
        """Why the episode ended.

        Raises:
            Exception: it failed.
        """
        if session.stop == StopReason.PARSE_ERROR:
            raise ResponseParseError("no message can be made of what was sampled") from session.failure
        if session.stop == StopReason.ABORTED:
            trajectory.stop_reason, trajectory.trainable = StopReason.ABORTED, False
        elif not trajectory.turns:
            raise _unanswered(session, problem, f"{self.gateway.url}/trajectories/TOKEN/v1")
        elif session.stop is not None:  # it was refused, and whatever became of it then, it ended for that
            trajectory.stop_reason = session.stop
        elif problem is not None:
            raise problem
        else:
            trajectory.stop_reason = StopReason.DONE

    async def _outcome(self, session: Session, assignment: Assignment) -> Outcome | None:
        """Let the program play.

        Raises:
            EngineLostError: the program would wait for nothing.
        """
        playing = asyncio.ensure_future(self._until_ended(session, assignment))
        finished = asyncio.ensure_future(session.finished.wait())
        try:
            await asyncio.wait((playing, finished), return_when=asyncio.FIRST_COMPLETED)
            if not isinstance(session.failure, EngineLostError):  # it may say that it is done, and clear up
                await asyncio.wait((playing,))
        finally:
            for task in (playing, finished):
                task.cancel()
            await asyncio.wait((playing, finished))  # until nothing of the program runs
        if isinstance(session.failure, EngineLostError):
            raise session.failure
        return playing.result()

    async def _until_ended(self, session: Session, assignment: Assignment) -> Outcome | None:
        outcome = await self.runner.run(assignment)
        if outcome is None and self.runner.plays_on:
            await session.finished.wait()
            with suppress(TimeoutError):
                async with asyncio.timeout(LATE_REPORT):
                    await session.paid.wait()
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
class Watched:
    """What a session needs of an engine, and when turns were sampled."""

    engine: Engine
    sampling: Occupancy

    def open(self, trajectory_id: str) -> None:
        self.engine.open(trajectory_id)

    async def generate(self, trajectory_id: str, prompt: list[int], sampling: SamplingParams) -> Generation:
        with self.sampling:
            return await self.engine.generate(trajectory_id, prompt, sampling)

    def release(self, trajectory_id: str) -> None:
        self.engine.release(trajectory_id)


def _pay(session: Session, outcome: Outcome) -> None:
    """
    Raises:
        AgentError: its rewards are not one for each call.
    """
    if outcome.rewards is None:
        return
    try:
        session.pay(outcome.rewards)
    except RequestError as error:
        raise AgentError(f"the program's rewards do not fit: {error.message}") from None


def _unsaid(session: Session, outcome: Outcome | None) -> AgentError | None:
    """What is wrong with a program that has ended by itself."""
    said = outcome.error if outcome is not None and outcome.error else session.error
    if said or session.status == "failed":
        return AgentError(said or "the program reported that it failed")
    if session.rewards is None:
        return UnpaidError(
            "the program ended without a reward; let it return one, write it to MTRL_RESULT or report it to "
            "/update-reward"
        )
    return None


def _unanswered(session: Session, problem: Exception | None, url: str) -> AgentError:
    """What is wrong with a program that got not a single answer."""
    if session.stop is not None or session.failure is not None:
        said = "no call of the program was answered"
    else:
        said = f"the program never called the model, which it was told to ask at {url}"
    if problem is not None and not isinstance(problem, UnpaidError):
        said += f" ({type(problem).__name__}: {next(iter(str(problem).splitlines()), '')})"
    elif session.stop == StopReason.CONTEXT_LIMIT:
        said += " (its first prompt does not fit generator.max_context_length)"
    error = AgentError(said)
    error.__cause__ = problem or session.failure
    return error
