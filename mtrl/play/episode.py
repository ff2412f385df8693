"""One episode that the caller steps: the environment, threads and time limits are those of training, but turns hold
text instead of tokens."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mtrl.config.schema import Config
from mtrl.environments.base import BaseEnvironment, StepResult
from mtrl.environments.pool import EnvironmentPool
from mtrl.rewards.compose import RewardComposer
from mtrl.rollout.episode import fail
from mtrl.rollout.stepper import Stepper, TimedCalls, text_message, text_turn
from mtrl.types import Group, Message, Row, Trajectory
from mtrl.utils.plain_numbers import finite
from mtrl.utils.process_guard import exit_as_error


@dataclass(frozen=True)
class Rules:
    """The environment factory, threads and limits that all episodes of a configuration share."""

    make_environment: Callable[[], BaseEnvironment]
    pool: EnvironmentPool
    max_turns: int
    step_timeout: float
    episode_timeout: float

    @classmethod
    def of(cls, config: Config, make_environment: Callable[[], BaseEnvironment]) -> Rules:
        environment = config.environment
        pool = EnvironmentPool(environment.max_workers)
        turns = config.generator.max_turns
        return cls(make_environment, pool, turns, environment.step_timeout, environment.episode_timeout)


class TextEpisode:
    """An episode. Call `open`, then `say` until it is `over`, then `close`. An exception of the environment ends the
    episode and is recorded in its trajectory.

    Example::

        episode = TextEpisode(rules, row, "play")
        prompt = await episode.open()
        while not episode.over:
            result = await episode.say(input())
        await episode.close()
        await judge(episode.trajectory, row, rules, composer, family.score)
    """

    def __init__(self, rules: Rules, row: Row, group_id: str, index: int = 0):
        self.rules, self.row = rules, row
        self.trajectory = Trajectory(str(row["id"]), group_id, index)
        self.observation: list[Message] = []
        """The latest messages: the prompt first, then the environment's last observation."""
        calls = TimedCalls(rules.pool, rules.step_timeout, rules.episode_timeout)
        # The environment may change its row, which must not affect other episodes.
        own = copy.deepcopy(row)
        self._stepper = Stepper(rules.make_environment, calls, self.trajectory, own, rules.max_turns)

    @property
    def over(self) -> bool:
        return self._stepper.over

    @property
    def tools(self) -> list[dict[str, Any]]:
        """Tools that the environment offers; empty before `open`."""
        return self._stepper.tools

    @property
    def failed(self) -> bool:
        """Whether the environment raised an exception, or exceeded a time limit."""
        return self.trajectory.error is not None

    @property
    def problem(self) -> str:
        """The first line of the error of a failed episode, without the traceback."""
        return (self.trajectory.error or "").partition("\n")[0]

    async def open(self) -> list[Message]:
        """Create the environment, reset it with the row, and return the prompt."""
        try:
            self.observation = await self._stepper.open()
        except Exception as error:
            self._fail(error)
        return self.observation

    async def say(self, text: str, message: Message | None = None) -> StepResult | None:
        """Take one turn, and return its result; None if the turn failed. A cancelled turn ends the episode, because the
        environment may still be taking it. `message` is the parsed response, if the caller has it."""
        message = message or text_message(text, self.tools, len(self.trajectory.turns))
        turn = text_turn(text, self.observation, message)
        self.trajectory.turns.append(turn)
        try:
            result, self.observation = await self._stepper.take(turn)
        except asyncio.CancelledError:
            self._stepper.over = True
            raise
        except Exception as error:
            self._fail(error)
            return None
        return result

    async def truncate(self) -> None:
        """End the episode because a limit of the run was reached."""
        try:
            await self._stepper.truncate()
        except Exception as error:
            self._fail(error)

    async def close(self) -> None:
        """Close the environment, also after a failure. A second call has no effect."""
        try:
            await self._stepper.close(self.rules.pool, self.rules.step_timeout)
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._stepper.over = True
        if not self.failed:  # the first error counts
            fail(self.trajectory, error)


async def judge(
    trajectory: Trajectory, row: Row, rules: Rules, composer: RewardComposer, score: Callable[[Trajectory, Row], float]
) -> None:
    """Compute the rewards of the turns as in training, and the score. An exception of either is recorded as the
    trajectory's error."""
    await judge_group([trajectory], row, rules, composer, score)


async def judge_group(
    trajectories: Sequence[Trajectory],
    row: Row,
    rules: Rules,
    composer: RewardComposer,
    score: Callable[[Trajectory, Row], float],
) -> None:
    """Like `judge`, for at least one trajectory of a group; an exception of the rewards is the error of each."""
    try:
        await composer.apply_async(Group(trajectories[0].group_id, row, list(trajectories)))
    except Exception as error:
        for trajectory in trajectories:
            fail(trajectory, error)
        return
    for trajectory in trajectories:
        await _score(trajectory, row, rules, score)


async def _score(trajectory: Trajectory, row: Row, rules: Rules, score: Callable[[Trajectory, Row], float]) -> None:
    try:
        seconds = rules.episode_timeout
        judged = await rules.pool.call(score, trajectory.without_summaries(), copy.deepcopy(row), timeout=seconds)
        with exit_as_error():
            trajectory.score = finite(judged, "the scorer returned")
    except Exception as error:
        fail(trajectory, error)
