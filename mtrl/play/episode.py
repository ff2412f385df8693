"""One episode that the caller steps: the environment, threads and time limits are those of training, but turns hold
text instead of tokens."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mtrl.config.schema import Config
from mtrl.environments.base import BaseEnvironment, StepResult, TakesMessages
from mtrl.environments.factory import close_now
from mtrl.environments.pool import CallTimeoutError, EnvironmentPool
from mtrl.environments.results import add_payments, as_messages, as_step_result
from mtrl.environments.tool_calls import message_calls, parse_calls
from mtrl.rewards.compose import RewardComposer
from mtrl.types import FinishReason, Group, Message, Row, StopReason, Trajectory, Turn
from mtrl.utils.plain_numbers import finite
from mtrl.utils.process_guard import failing_alone
from mtrl.utils.reasons import account

CHARACTERS_PER_TOKEN = 4
"""Estimated number of characters per token. No tokenizer exists here, so a response gets that number of zeros as ids,
for rewards that count tokens."""


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


class Episode:
    """An episode. Call `open`, then `say` until it is `over`, then `close`. An exception of the environment ends the
    episode and is recorded in its trajectory.

    Example::

        episode = Episode(rules, row, "play")
        prompt = await episode.open()
        while not episode.over:
            result = await episode.say(input())
        await episode.close()
        await judge(episode.trajectory, row, rules, composer, family.score)
    """

    def __init__(self, rules: Rules, row: Row, group_id: str, index: int = 0):
        self.rules, self.row = rules, row
        self.trajectory = Trajectory(str(row["id"]), group_id, index)
        self.tools: list[dict[str, Any]] = []
        self.over = False
        self.observation: list[Message] = []
        """The latest messages: the prompt first, then the environment's last observation."""
        self._ground_truth: dict[str, Any] = {}
        self._environment: Any = None
        self._seconds = 0.0

    @property
    def failed(self) -> bool:
        """Whether the environment raised an exception, or exceeded a time limit."""
        return self.trajectory.error is not None

    async def open(self) -> list[Message]:
        """Create the environment, reset it with the row, and return the prompt."""
        row = copy.deepcopy(self.row)  # the environment may change the row, which must not affect other episodes
        self._ground_truth = row["ground_truth"]
        try:
            environment = self._environment = await self._call(self.rules.make_environment, discard=close_now)
            opening = await self._call(environment.reset, row)
            self.tools = list(environment.tools) if isinstance(environment, TakesMessages) else []
            self.observation = list(row["prompt"]) if opening is None else as_messages(opening)
        except Exception as error:
            self._fail(error)
        return self.observation

    async def say(self, text: str, message: Message | None = None) -> StepResult | None:
        """Take one turn, and return its result; None if the turn failed. `message` is the parsed response, if the
        caller has it."""
        turn = self._turn(text, message)
        self.trajectory.turns.append(turn)
        try:
            environment = self._environment
            if isinstance(environment, TakesMessages):
                value = await self._call(environment.respond, copy.deepcopy(turn.message), text, self._ground_truth)
            else:
                value = await self._call(environment.step, text, self._ground_truth)
            result = as_step_result(value, environment)
            self.observation = as_messages(result.observation)
        except Exception as error:
            self._fail(error)
            return None
        turn.reward, turn.components, turn.metrics = result.reward, result.components, result.metrics
        last = len(self.trajectory.turns) >= self.rules.max_turns
        if result.done or last:
            self.over = True
            finished = result.done and not result.truncated
            self.trajectory.stop_reason = StopReason.DONE if finished else StopReason.MAX_TURNS
            self.trajectory.final_observation = self.observation
            if not result.done:
                await self.truncate()
        return result

    async def truncate(self) -> None:
        """End the episode because a limit of the run was reached."""
        self.over = True
        try:
            payments = await self._call(self._environment.truncate, self._ground_truth)
            add_payments(self.trajectory.turns[-1], payments, self._environment)
        except Exception as error:
            self._fail(error)

    async def close(self) -> None:
        """Close the environment, also after a failure. A second call has no effect."""
        environment, self._environment, self.over = self._environment, None, True
        if environment is None:
            return
        try:
            await self.rules.pool.finish(environment.close, timeout=self.rules.step_timeout)
        except Exception as error:
            self._fail(error)

    async def _call(self, function: Callable[..., Any], *args: Any, discard: Callable[[Any], Any] | None = None) -> Any:
        limit = self.rules.episode_timeout
        if self._seconds >= limit:
            raise CallTimeoutError(f"the environment took longer than environment.episode_timeout={limit} s")
        begun = time.perf_counter()
        try:
            return await self.rules.pool.call(function, *args, timeout=self.rules.step_timeout, discard=discard)
        finally:
            self._seconds += time.perf_counter() - begun

    def _turn(self, text: str, message: Message | None) -> Turn:
        tokens = math.ceil(len(text) / CHARACTERS_PER_TOKEN)
        return Turn(
            observation_ids=[],
            action_ids=[0] * tokens,
            action_logprobs=[0.0] * tokens,
            version_spans=[(0, tokens)] if tokens else [],
            finish=FinishReason.STOP,
            text=text,
            message=message or self._parsed(text),
            observation=self.observation,
        )

    def _parsed(self, text: str) -> Message:
        """Return the response as a message; if the environment has tools, parse tool calls from their text form."""
        content, calls = parse_calls(text) if self.tools else (text, [])
        message: Message = {"role": "assistant", "content": content}
        return message | {"tool_calls": message_calls(calls, len(self.trajectory.turns))} if calls else message

    def _fail(self, error: Exception) -> None:
        self.over = True
        if not self.failed:  # the first error counts
            fail(self.trajectory, error)


async def judge(
    trajectory: Trajectory, row: Row, rules: Rules, composer: RewardComposer, score: Callable[[Trajectory, Row], float]
) -> None:
    """Compute the rewards of the turns as in training, and the score. An exception of either is recorded as the
    trajectory's error."""
    try:
        await composer.apply_async(Group(trajectory.group_id, row, [trajectory]))
        seconds = rules.step_timeout
        judged = await rules.pool.call(score, trajectory, copy.deepcopy(row), timeout=seconds)
        with failing_alone():
            trajectory.score = finite(judged, "the scorer returned")
    except Exception as error:
        fail(trajectory, error)


def fail(trajectory: Trajectory, error: Exception) -> None:
    """Record an error in the trajectory: its first line is the message, and the traceback follows."""
    late = isinstance(error, CallTimeoutError)
    trajectory.stop_reason = StopReason.TIMEOUT if late else StopReason.ENV_ERROR
    trajectory.trainable = False
    trajectory.error = account(error)
