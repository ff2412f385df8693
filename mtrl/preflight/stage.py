"""Episodes without a model: scripted responses run against the real environment, reward and scorer."""

from __future__ import annotations

import asyncio
import copy
import json
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mtrl.environments.base import BaseEnvironment
from mtrl.environments.pool import CallTimeoutError, EnvironmentPool
from mtrl.rewards.compose import RewardComposer
from mtrl.rollout.stepper import Stepper, TimedCalls, text_message, text_turn
from mtrl.types import Group, Row, StopReason, Trajectory
from mtrl.utils.images import content_text
from mtrl.utils.plain_numbers import finite
from mtrl.utils.process_guard import exit_as_error
from mtrl.utils.user_code import reason

Moves = Callable[[str | None], str | None]
"""Function from the environment's last text (None before the first action) to the next response; None ends the
episode."""

SCORED = "the scorer returned"
"""Start of the error message about a score that is NaN, infinite or no number."""
GRACE = 0.1
"""Seconds for cancelled episodes to close their environments."""


@dataclass(frozen=True)
class Script:
    """A row and the player that produces its responses."""

    row: Row
    player: Callable[[], Moves]
    """Factory of a new player for each episode."""
    label: str = ""


@dataclass
class ScriptedEpisode:
    """The trajectory of a script."""

    script: Script
    trajectory: Trajectory
    tools: list[dict[str, Any]] = field(default_factory=list)
    """Name, description and parameters of each tool of the environment."""
    offers_tools: bool = False
    """Whether the chat template shows the tools to the model; otherwise only the prompt does."""

    @property
    def row(self) -> Row:
        return self.script.row

    @property
    def label(self) -> str:
        return self.script.label

    @property
    def responses(self) -> list[str]:
        return [turn.text for turn in self.trajectory.turns]

    @property
    def reward(self) -> float:
        """The composed reward that training would use, summed over the turns."""
        return self.trajectory.reward

    @property
    def environment_reward(self) -> float:
        """The reward that the environment itself returned, summed over the turns."""
        return math.fsum(self.trajectory.environment_rewards)

    @property
    def score(self) -> float:
        return self.trajectory.score or 0.0

    @property
    def error(self) -> str | None:
        return self.trajectory.error

    @property
    def stopped_by_player(self) -> bool:
        """Whether the player had no further response before the episode was over."""
        return self.trajectory.stop_reason == StopReason.ABORTED

    def transcript(self) -> list[Any]:
        """Return all that must be equal when the responses are equal, as JSON values: one entry per turn, and one for
        the end.

        Metrics are left out because they may hold times. Errors may hold paths, so only the kind of an error is
        included.
        """
        turns = [
            {
                "observation": turn.observation,
                "response": turn.text,
                "reward": turn.reward,
                "components": turn.components,
            }
            for turn in self.trajectory.turns
        ]
        end = {
            "observation": self.trajectory.final_observation,
            "stop_reason": self.trajectory.stop_reason,
            "error": self.error and self.error.partition(":")[0],
            "score": self.trajectory.score,
        }
        return json.loads(json.dumps([*turns, end], default=repr))


def scripted(responses: Sequence[str], then: str | None = None) -> Callable[[], Moves]:
    """Return the factory of a player that gives these responses in order, and then `then` until the episode ends."""

    def make() -> Moves:
        left = iter(responses)
        return lambda observation: next(left, then)

    return make


@dataclass
class ScriptTally:
    """Number of scripts that were left out for lack of time since the last call of `take`."""

    left_out: int = 0

    def take(self) -> int:
        taken, self.left_out = self.left_out, 0
        return taken


@dataclass
class Stage:
    """Runs scripts within time limits. An exception of an environment is recorded in its episode and not raised."""

    make_environment: Callable[[], BaseEnvironment]
    score: Callable[[Trajectory, Row], float]
    composer: RewardComposer
    max_turns: int
    step_timeout: float
    episode_timeout: float
    seconds: float
    """Seconds after the start of a call of `run` during which an episode may start."""
    patience: float = 0.0
    """Additional seconds for episodes that are in progress when `seconds` have passed."""
    deadline: float = math.inf
    """Time of the monotonic clock, in seconds, after which no episode of any call starts."""
    tally: ScriptTally = field(default_factory=ScriptTally)
    workers: int = 1
    """Default number of threads, and of episodes in progress at a time."""

    def run(
        self, scripts: Iterable[Script], workers: int | None = None, at_once: int | None = None
    ) -> list[ScriptedEpisode]:
        """Return the episodes that ended in time, in the order of their scripts.

        `at_once` episodes are in progress at a time, on `workers` threads. One worker and one episode run sequentially;
        one worker and many episodes interleave their turns; many workers and many episodes run in parallel.
        """
        return asyncio.run(self._run_all(list(scripts), workers or self.workers, at_once or self.workers))

    async def _run_all(self, scripts: list[Script], workers: int, at_once: int) -> list[ScriptedEpisode]:
        pool, gate = EnvironmentPool(workers), asyncio.Semaphore(at_once)
        last = min(time.monotonic() + self.seconds, self.deadline)

        async def wait_and_run(script: Script) -> ScriptedEpisode | None:
            async with gate:
                if time.monotonic() > last:
                    return None
                return await self._run_script(script, pool)

        try:
            tasks = [asyncio.ensure_future(wait_and_run(script)) for script in scripts]
            if not tasks:
                return []
            left = max(last - time.monotonic(), 0.0) + self.patience
            done, late = await asyncio.wait(tasks, timeout=left)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late, timeout=GRACE)
            results = [task.result() for task in tasks if task in done]
            finished = [episode for episode in results if episode is not None]
            self.tally.left_out += len(tasks) - len(finished)
            return finished
        finally:
            pool.close()

    async def _run_script(self, script: Script, pool: EnvironmentPool) -> ScriptedEpisode:
        row = copy.deepcopy(script.row)
        trajectory = Trajectory(task_id=str(row.get("id")), group_id="preflight", index=0)
        call = TimedCalls(pool, self.step_timeout, self.episode_timeout)
        stepper = Stepper(self.make_environment, call, trajectory, row, self.max_turns)
        episode = ScriptedEpisode(script, trajectory)
        try:
            try:
                await self._turns(stepper, script.player(), episode)
            finally:
                await stepper.close(pool, self.step_timeout)
            # Rewards and scores get the row as loaded, without the environment's changes, as in a run.
            await self.composer.apply_async(Group("preflight", script.row, [trajectory]))
            score = await pool.call(self.score, trajectory, copy.deepcopy(script.row), timeout=self.step_timeout)
            with exit_as_error():
                trajectory.score = finite(score, SCORED)
        except Exception as error:
            late = isinstance(error, CallTimeoutError)
            trajectory.stop_reason = StopReason.TIMEOUT if late else StopReason.ENV_ERROR
            trajectory.error = reason(error)
        return episode

    async def _turns(self, stepper: Stepper, moves: Moves, episode: ScriptedEpisode) -> None:
        """Run the turns until the episode is over, or the player has no further response."""
        trajectory, text = stepper.trajectory, None
        observation = await stepper.open()
        episode.tools, episode.offers_tools = _tools_of(stepper), bool(stepper.tools)
        trajectory.stop_reason = StopReason.MAX_TURNS
        while not stepper.over:
            response = moves(text)
            if response is None:
                trajectory.stop_reason, trajectory.final_observation = StopReason.ABORTED, observation
                return
            message = text_message(response, stepper.tools, len(trajectory.turns))
            turn = text_turn(response, observation, message)
            trajectory.turns.append(turn)
            _, observation = await stepper.take(turn)
            text = "".join(content_text(message["content"]) for message in observation)


def _tools_of(stepper: Stepper) -> list[dict[str, Any]]:
    """Return the tools that the environment offers by their schemas, or those of its attribute `toolbox`."""
    from mtrl.environments.tools import Tool  # imports pydantic, which --help does not need

    toolbox = getattr(stepper.environment, "toolbox", {})
    schemas = stepper.tools or [tool.schema for tool in toolbox.values() if isinstance(tool, Tool)]
    return [schema["function"] for schema in schemas if isinstance(schema.get("function"), dict)]
