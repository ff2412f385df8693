"""The environment's side of one episode: the one place that opens an environment, applies turns to it and ends it.

Every loop that runs episodes uses it: `EpisodeLoop` with sampled tokens, and `demonstrations`, `mtrl.play`,
`mtrl.rescore` and the pre-flight with texts (`text_turn`). The loops differ in where a turn comes from, and in the
time limits of `call`.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from typing import Any, Protocol

from mtrl.environments.base import BaseEnvironment, StepResult, TakesMessages
from mtrl.environments.factory import close_now
from mtrl.environments.pool import CallTimeoutError, EnvironmentPool
from mtrl.environments.results import add_truncation, as_messages, as_step_result, as_tools
from mtrl.environments.tool_calls import message_calls, parse_calls
from mtrl.types import FinishReason, Message, Row, StopReason, Trajectory, Turn
from mtrl.utils.process_guard import exit_as_error

CHARACTERS_PER_TOKEN = 4
"""Estimated number of characters per token, for turns of text. No tokenizer exists there, so a response gets that
number of zeros as ids, for rewards that count tokens."""


class TimedCall(Protocol):
    """Calls a method of an environment within a time limit; `discard` receives a result that comes too late."""

    async def __call__(
        self, function: Callable[..., Any], *args: Any, discard: Callable[[Any], Any] | None = None
    ) -> Any: ...


class TimedCalls:
    """Calls of one episode, each within `step_timeout` seconds, and all together within `episode_timeout` seconds. The
    time between the calls does not count."""

    def __init__(self, pool: EnvironmentPool, step_timeout: float, episode_timeout: float):
        self.pool, self.step_timeout, self.episode_timeout = pool, step_timeout, episode_timeout
        self._seconds = 0.0

    async def __call__(
        self, function: Callable[..., Any], *args: Any, discard: Callable[[Any], Any] | None = None
    ) -> Any:
        """Return the result of the call.

        Raises:
            CallTimeoutError: the call, or all calls together, took too long.
        """
        limit = self.episode_timeout
        if self._seconds >= limit:
            raise CallTimeoutError(f"the environment took longer than environment.episode_timeout={limit} s")
        begun = time.perf_counter()
        try:
            return await self.pool.call(function, *args, timeout=self.step_timeout, discard=discard)
        finally:
            self._seconds += time.perf_counter() - begun


class Stepper:
    """The environment of one episode. `open` it, `take` turns until it is `over`, and `close` it in any case.

    Every method raises what the environment raised, `CallTimeoutError` after a time limit, and `TypeError` for a result
    of another form than an environment may return.

    Args:
        make_environment: factory of the environment.
        call: function that calls the environment's methods.
        trajectory: trajectory whose stop reason and final observation are set; its turns are the caller's.
        row: the episode's own copy of the row, which the environment may change.
        max_turns: maximum number of turns.
    """

    def __init__(
        self,
        make_environment: Callable[[], BaseEnvironment],
        call: TimedCall,
        trajectory: Trajectory,
        row: Row,
        max_turns: int,
    ):
        self.make_environment, self.call, self.max_turns = make_environment, call, max_turns
        self.trajectory, self.row = trajectory, row
        self.environment: Any = None
        self.tools: list[dict[str, Any]] = []
        """Tools that the environment offers to the policy, as JSON schemas."""
        self.over = False
        self._taken = 0

    async def open(self) -> list[Message]:
        """Create the environment, reset it with the row, and return the opening messages."""
        environment = self.environment = await self.call(self.make_environment, discard=close_now)
        opening = await self.call(environment.reset, self.row)
        self.tools = as_tools(environment.tools, environment) if isinstance(environment, TakesMessages) else []
        return list(self.row["prompt"]) if opening is None else as_messages(opening)

    async def take(self, turn: Turn) -> tuple[StepResult, list[Message]]:
        """Apply a turn and set its reward, components, metrics and the environment's seconds. Return the result and the
        observation as messages. The observation is the trajectory's final one until the next turn; after the last turn
        its stop reason is set as well."""
        self.trajectory.final_observation = []  # the turn holds the one before it
        begun = time.perf_counter()
        value = await self._step(turn)
        with exit_as_error():
            result = as_step_result(value, self.environment)
            observation = as_messages(result.observation)
        turn.seconds_environment = time.perf_counter() - begun
        turn.reward, turn.components = result.reward, result.components
        turn.metrics.update(result.metrics)
        self.trajectory.final_observation = observation
        self._taken += 1
        last = self._taken >= self.max_turns
        if result.done:
            self.trajectory.stop_reason = StopReason.MAX_TURNS if result.truncated else StopReason.DONE
        elif last:
            cut = turn.finish == FinishReason.LENGTH
            self.trajectory.stop_reason = StopReason.TURN_TOKEN_LIMIT if cut else StopReason.MAX_TURNS
        if result.done or last:
            self.over = True
            if not result.done:
                await self.truncate()
        return result, observation

    async def truncate(self) -> None:
        """End the episode because a limit of the run was reached; the environment may still reward the last turn."""
        self.over = True
        value = await self.call(self.environment.truncate, self.row["ground_truth"])
        add_truncation(self.trajectory.environment_turns[-1], value, self.environment)

    async def close(self, pool: EnvironmentPool, seconds: float) -> None:
        """Close the environment within `seconds`, if it was created. A second call has no effect."""
        environment, self.environment, self.over = self.environment, None, True
        if environment is not None:
            await pool.finish(environment.close, timeout=seconds)

    async def _step(self, turn: Turn) -> Any:
        environment, ground_truth = self.environment, self.row["ground_truth"]
        if isinstance(environment, TakesMessages):
            return await self.call(environment.respond, copy.deepcopy(turn.message), turn.text, ground_truth)
        return await self.call(environment.step, turn.text, ground_truth)


def text_turn(text: str, observation: list[Message], message: Message) -> Turn:
    """Return the turn of a response that is only a text, with an estimated number of tokens.

    Args:
        observation: messages before the response.
        message: the response as a message; see `text_message`.
    """
    tokens = math.ceil(len(text) / CHARACTERS_PER_TOKEN)
    return Turn(
        observation_ids=[],
        action_ids=[0] * tokens,
        action_logprobs=[0.0] * tokens,
        version_spans=[(0, tokens)] if tokens else [],
        finish=FinishReason.STOP,
        text=text,
        message=message,
        observation=observation,
    )


def text_message(text: str, tools: list[dict[str, Any]], number: int) -> Message:
    """Return a response as a message; if there are tools, tool calls are parsed from their text form. `number` is the
    number of turns before, for the calls' ids."""
    content, calls = parse_calls(text) if tools else (text, [])
    message: Message = {"role": "assistant", "content": content}
    return message | {"tool_calls": message_calls(calls, number)} if calls else message
