"""Agents that are Python functions: `function(row, client)`, sync or async."""

from __future__ import annotations

import inspect
import math
import threading
from collections.abc import Callable
from typing import Any

from mtrl.agents.client import AgentClient
from mtrl.agents.runner import AgentError, Assignment, ProgramResult, as_outcome
from mtrl.environments.pool import EnvironmentPool
from mtrl.types import Row

MAX_HANGING_THREADS = 256
"""Maximum number of threads that may hang in calls whose episodes are over."""


class CallableRunner:
    """Runs async functions on the event loop and other functions on daemon threads.

    A thread that hangs is abandoned, and ends with the process at the latest. When too many threads hang, new episodes
    fail immediately, and the number of failures then ends the run.
    """

    ends_by_report = False

    def __init__(self, function: Callable[..., Any], max_concurrent: int):
        """
        Args:
            function: called with a row and an `AgentClient`; see `as_outcome` for what it may return.
            max_concurrent: maximum number of functions that run at once.
        """
        self.function = function
        self.name = getattr(function, "__qualname__", None) or repr(function)
        self._pool = EnvironmentPool(max_concurrent)
        self._lock = threading.Lock()
        self._running_threads = self._awaited_threads = 0

    async def run(self, assignment: Assignment) -> ProgramResult | None:
        """See `AgentRunner`."""
        client = AgentClient(assignment.base_url, assignment.api_key, assignment.model)
        try:
            value = await self._call(assignment.row, client)
        finally:
            await client.close()
        return as_outcome(value, self.name)

    async def close(self) -> None:
        self._pool.close()

    async def _call(self, row: Row, client: AgentClient) -> Any:
        """Call the function without a time limit; the episode loop has one."""
        if inspect.iscoroutinefunction(self.function):
            return await self._pool.call(self.function, row, client, timeout=math.inf)
        if (hanging := self._running_threads - self._awaited_threads) >= MAX_HANGING_THREADS:
            raise AgentError(
                f"{hanging} calls of {self.name} still run although their episodes have ended; add a time limit to "
                "what they wait for, or use generator.agent.command, whose processes are ended"
            )
        self._awaited_threads += 1
        try:
            return await self._pool.call(self._call_in_thread, row, client, timeout=math.inf)
        finally:
            self._awaited_threads -= 1

    def _call_in_thread(self, row: Row, client: AgentClient) -> Any:
        with self._lock:
            self._running_threads += 1
        try:
            return self.function(row, client)
        finally:
            with self._lock:
                self._running_threads -= 1
