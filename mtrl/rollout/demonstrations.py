"""Conversations of a weak demonstrator with the real environment, which the warm start imitates."""

from __future__ import annotations

import asyncio
import copy
import inspect
import queue
import random
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, TypeVar

from mtrl.environments.base import BaseEnvironment
from mtrl.environments.family import Family
from mtrl.environments.players import REPEAT_LAST, demonstrator_moves, no_more_responses
from mtrl.errors import UserError
from mtrl.rollout.stepper import Stepper, text_message, text_turn
from mtrl.types import Demonstration, Row, Trajectory
from mtrl.utils.images import content_text
from mtrl.utils.process_guard import guarded
from mtrl.utils.user_code import reason

T = TypeVar("T")


def demonstrations(
    family: Family,
    make_environment: Callable[[], BaseEnvironment],
    rows: Sequence[Row],
    rng: random.Random,
    count: int,
    timeout: float,
) -> Iterator[Demonstration]:
    """Yield the conversations of `count` episodes, cycling over the rows. The episodes run in a thread, so that an
    environment that hangs is detected.

    Raises:
        UserError: the environment failed, or one episode took longer than `timeout` seconds.
    """
    results: queue.Queue[Demonstration | BaseException] = queue.Queue(maxsize=64)
    over = threading.Event()

    def run() -> None:
        for index in range(count):
            try:
                with guarded():
                    chat = demonstrate(family, make_environment, rows[index % len(rows)], rng)
                results.put(chat)
            except BaseException as error:  # a SystemExit would end the thread silently
                results.put(error)
                return
            if over.is_set():
                return

    threading.Thread(target=run, daemon=True, name="mtrl-demonstrations").start()
    try:
        for index in range(count):
            yield _next(results, rows[index % len(rows)], timeout)
    finally:
        over.set()
        while not results.empty():  # the thread may be blocked in `put`, and must be able to see `over`
            results.get_nowait()


def _next(results: queue.Queue[Demonstration | BaseException], row: Row, timeout: float) -> Demonstration:
    where = f"the warm start's demonstration of row {row.get('id')}"
    try:
        episode = results.get(timeout=timeout)
    except queue.Empty:
        raise UserError(
            f"{where} took longer than environment.step_timeout={timeout} s; shorten its step, or raise the limit"
        ) from None
    if isinstance(episode, UserError):
        raise episode
    if isinstance(episode, BaseException):
        raise UserError(f"{where} failed: {reason(episode)}") from episode
    return episode


def demonstrate(
    family: Family, make_environment: Callable[[], BaseEnvironment], row: Row, rng: random.Random
) -> Demonstration:
    """Run one episode with the family's demonstrator. Return the messages up to its last response, and the tools that
    the environment offers.

    Raises:
        UserError: the demonstrator failed, or has no more responses before the episode is over.
    """
    return _result(_episode(family, make_environment, row, rng))


async def _episode(
    family: Family, make_environment: Callable[[], BaseEnvironment], row: Row, rng: random.Random
) -> Demonstration:
    row = copy.deepcopy(row)  # changes that an environment makes to its row stay local
    moves = demonstrator_moves(family, row, rng)
    environment = make_environment()
    trajectory = Trajectory(str(row.get("id")), "demonstration", 0)
    stepper = Stepper(lambda: environment, _call_now, trajectory, row, environment.max_turns)
    try:
        observed = await stepper.open()
        messages, observation = list(observed), None
        while not stepper.over:
            text = moves(observation)
            if text is None:
                raise UserError(f"{no_more_responses(row, len(trajectory.turns))}; {REPEAT_LAST}")
            turn = text_turn(text, observed, text_message(text, stepper.tools, len(trajectory.turns)))
            trajectory.turns.append(turn)
            _, observed = await stepper.take(turn)
            messages += [{"role": "assistant", "content": text}, *observed]
            observation = "".join(content_text(message["content"]) for message in observed)
        while messages[-1]["role"] != "assistant":
            messages.pop()
        return Demonstration(messages, stepper.tools)
    finally:
        await _call_now(environment.close)


async def _call_now(function: Callable[..., Any], *args: Any, discard: Callable[[Any], Any] | None = None) -> Any:
    """Call a method of an environment without a time limit, since `demonstrations` limits the whole episode."""
    value = function(*args)
    if not inspect.isawaitable(value):
        return value

    async def wait() -> Any:
        return await value

    return asyncio.run(wait())


def _result(episode: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine that waits for nothing. No event loop runs it, so an environment may start one
    in its methods, as it may in the threads of `EnvironmentPool`."""
    try:
        episode.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    raise RuntimeError("a demonstration waited for an event loop")
