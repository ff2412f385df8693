"""Sessions of programs that mtrl does not start: they are opened by name, and written to a file when they end."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from mtrl.engines.base import EngineLostError, SamplingParams
from mtrl.errors import UserError
from mtrl.gateway.server import Gateway
from mtrl.gateway.session import Session
from mtrl.rollout.rollouts import stream_seed
from mtrl.types import FAILED, StopReason, Trajectory, write_jsonl

SECONDS_FOR_REWARD = 2.0
"""Seconds to wait for the reward of a trajectory that was completed without one: SageMaker's SDK reports it right
afterwards."""


@dataclass
class SessionManager:
    """Opens sessions by the name of their trajectory, waits for their end and writes the trajectories to a file."""

    gateway: Gateway
    sampling: SamplingParams
    seed: int
    path: Path
    """JSONL file to which trajectories are appended."""
    seconds: float
    """Time limit of a trajectory, from its opening to its completion, in seconds."""
    note: Callable[[str], None] = print
    written: int = 0
    unwritten: int = 0
    """Number of trajectories that could not be written to the file."""
    shutdown: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the engine is lost, and by the caller that ends the gateway."""
    failure: EngineLostError | None = None
    """The loss of the engine, if that set `shutdown`."""
    _watchers: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    """Task that waits for the end of each open session, by the name of its trajectory."""

    def open(self, name: str) -> Session:
        """Open the trajectory of a name.

        Raises:
            ValueError: a trajectory of this name is open already.
        """
        seed = stream_seed(self.seed, name, 0)
        session = self.gateway.open(name, replace(self.sampling, seed=seed))
        self._watchers[name] = asyncio.create_task(self._watch(session), name=f"mtrl-session-{name}")
        return session

    async def close(self) -> None:
        """Close and write the trajectories that are still open."""
        tasks = list(self._watchers.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _watch(self, session: Session) -> None:
        stop_reason = StopReason.ABORTED
        try:
            async with asyncio.timeout(self.seconds):
                await session.finished.wait()
            stop_reason = _stop_reason(session)
            with suppress(TimeoutError):
                await asyncio.wait_for(session.rewards_reported.wait(), SECONDS_FOR_REWARD)
        except TimeoutError:
            stop_reason = session.stop_reason or StopReason.TIMEOUT
        finally:
            self.gateway.close_session(session)
            del self._watchers[session.name]
            self._write(session, stop_reason)
            if isinstance(session.failure, EngineLostError):
                self.failure = session.failure
                self.shutdown.set()

    def _write(self, session: Session, stop_reason: StopReason) -> None:
        trajectory = Trajectory(
            session.name, session.name, 0, session.turns(), stop_reason, metrics=dict(session.metrics)
        )
        trajectory.trainable = stop_reason not in (StopReason.ABORTED, *FAILED)
        trajectory.error = session.error
        if not trajectory.turns:
            self.note(f"{session.name}: no call was answered, so nothing is written")
            return
        size = self.path.stat().st_size if self.path.exists() else 0
        try:
            write_jsonl(self.path, [trajectory])
        except OSError as error:
            self.unwritten += 1
            self.note(f"{session.name}: lost, because {self.path} cannot be written ({error.strerror})")
            with suppress(OSError):  # half a line would corrupt the next one
                os.truncate(self.path, size)
            return
        self.written += 1
        reward = f", reward {trajectory.reward:g}" if session.rewards is not None else ", without a reward"
        self.note(f"{session.name}: {stop_reason}, {len(trajectory.turns)} turns{reward}")


def names_in(path: Path) -> set[str]:
    """Return the names of the trajectories in a file; incomplete lines are skipped.

    Raises:
        UserError: the file cannot be read.
    """
    names: set[str] = set()
    try:
        with path.open("rb") as file:
            for line in file:
                with suppress(ValueError, KeyError, TypeError, RecursionError):
                    names.add(str(json.loads(line)["task_id"]))
    except FileNotFoundError:
        return names
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); name another folder by gateway.out") from error
    return names


def _stop_reason(session: Session) -> StopReason:
    """Return the stop reason of a trajectory that has ended."""
    if session.status is None:  # the engine is lost
        return StopReason.ABORTED
    return session.stop_reason or (StopReason.DONE if session.status == "ready" else StopReason.ENV_ERROR)
