"""Conversations of a weak demonstrator with the real environment, which the warm start imitates."""

from __future__ import annotations

import asyncio
import copy
import inspect
import queue
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mtrl.environments.base import BaseEnvironment, StepResult
from mtrl.environments.family import Family
from mtrl.environments.results import as_messages, as_step_result
from mtrl.errors import UserError
from mtrl.types import Message, Row
from mtrl.utils.process_guard import guarded
from mtrl.utils.user_code import reason


def demonstrations(
    family: Family,
    make_environment: Callable[[], BaseEnvironment],
    rows: Sequence[Row],
    rng: random.Random,
    count: int,
    timeout: float,
) -> Iterator[list[Message]]:
    """Yield the conversations of `count` episodes, cycling over the rows. The episodes run in a thread, so that an
    environment that hangs is detected.

    Raises:
        UserError: the environment failed, or one episode took longer than `timeout` seconds.
    """
    results: queue.Queue[list[Message] | BaseException] = queue.Queue(maxsize=64)
    over = threading.Event()

    def run() -> None:
        for index in range(count):
            try:
                with guarded():
                    messages = demonstrate(family, make_environment, rows[index % len(rows)], rng)
                results.put(messages)
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


def _next(results: queue.Queue[list[Message] | BaseException], row: Row, timeout: float) -> list[Message]:
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
) -> list[Message]:
    """Run one episode with the family's demonstrator. Return the messages up to its last response."""
    assert family.demonstrate is not None
    row = copy.deepcopy(row)  # changes that an environment makes to its row stay local
    demonstrator = family.demonstrate(row, rng)
    environment = make_environment()
    try:
        opening = _now(environment.reset(row))
        messages = list(row["prompt"]) if opening is None else as_messages(opening)
        observation: str | None = None
        for _ in range(environment.max_turns):
            response = demonstrator.act(observation)
            messages.append({"role": "assistant", "content": response})
            result: StepResult = as_step_result(_now(environment.step(response, row["ground_truth"])), environment)
            if result.done:
                break
            new = as_messages(result.observation)
            messages += new
            observation = "".join(str(m["content"]) for m in new)
        while messages[-1]["role"] != "assistant":
            messages.pop()
        return messages
    finally:
        _now(environment.close())


def _now(value: Any) -> Any:
    """Return the result of an environment's method, awaited if the method is async."""

    async def wait() -> Any:
        return await value

    return asyncio.run(wait()) if inspect.isawaitable(value) else value
