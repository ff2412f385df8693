"""A simulated server of an engine, which samples one token for all its turns in each iteration."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from clock import Clock


@dataclass(frozen=True)
class Speed:
    """Speed of one server: a roofline of reading weights and cached keys and values, and of arithmetic."""

    fixed: float
    """Seconds of an iteration without cached tokens: weights are read and kernels are started."""
    per_cached_token: float
    """Further seconds of an iteration for each token whose keys and values are read."""
    per_turn: float
    """Seconds of arithmetic in an iteration for each turn."""
    per_prompt_token: float
    """Seconds of the prefill for each token."""
    slots: int
    """Greatest number of turns that are sampled at the same time."""
    room: float
    """Number of tokens whose keys and values fit in the cache."""

    def iteration(self, turns: int, cached: float) -> float:
        """Return the seconds in which each of `turns` turns gets one token."""
        return max(self.fixed + self.per_cached_token * cached, self.per_turn * turns)


@dataclass(eq=False)
class Asked:
    """Request of a turn."""

    prefill: int
    """Number of tokens of the prompt that are not cached."""
    context: int
    """Number of tokens of the whole prompt."""
    sampled: int
    """Number of tokens to sample."""
    then: Callable[[], None]
    """Called when the turn has ended."""
    end: float = 0.0
    """Number of iterations of the server, since its start, after which the turn ends."""

    @property
    def cached(self) -> float:
        """Number of tokens with keys and values, as the mean over the turn."""
        return self.context + self.sampled / 2


class Server:
    """Samples all running turns at the same time. A prefill stops the other turns, and turns without a slot wait in
    order."""

    def __init__(self, clock: Clock, speed: Speed):
        self.clock, self.speed = clock, speed
        self.waiting: deque[Asked] = deque()
        self.busy = 0.0
        """Seconds in which the server worked."""
        self._running: list[tuple[float, int, Asked]] = []
        self._cached, self._got, self._debt, self._since = 0.0, 0.0, 0.0, 0.0
        self._paused, self._plan, self._numbers = False, 0, count()

    @property
    def load(self) -> int:
        """Number of running and waiting turns."""
        return len(self._running) + len(self.waiting)

    def ask(self, turn: Asked) -> None:
        """Sample a turn, and call its `then` when it has ended."""
        self._settle()
        self.waiting.append(turn)
        self._begin()
        self._replan()

    def drop(self, turn: Asked) -> None:
        """Cancel a turn, unless it has ended."""
        self._settle()
        if turn in self.waiting:
            self.waiting.remove(turn)
        if any(turn is running for _, _, running in self._running):
            self._running = [entry for entry in self._running if entry[2] is not turn]
            heapq.heapify(self._running)
            self._cached -= turn.cached
        self._begin()
        self._replan()

    def pause(self) -> None:
        """Sample nothing until `resume`."""
        self._settle()
        self._paused = True
        self._replan()

    def resume(self) -> None:
        """Continue with new weights: all keys and values are computed again."""
        self._settle()
        self._paused = False
        self._debt += self.speed.per_prompt_token * self._cached
        self._begin()
        self._replan()

    def _settle(self) -> None:
        """Use the time since the last call, first for prefills and then for iterations."""
        passed, self._since = self.clock.now - self._since, self.clock.now
        if self._paused or not self._running:
            return
        self.busy += passed
        worked_off = min(self._debt, passed)
        self._debt -= worked_off
        self._got += (passed - worked_off) / self._iteration()

    def _iteration(self) -> float:
        return self.speed.iteration(len(self._running), max(0.0, self._cached))

    def _begin(self) -> None:
        """Start waiting turns while there are slots and room."""
        while self.waiting and not self._paused and len(self._running) < self.speed.slots:
            turn = self.waiting[0]
            if self._running and self._cached + turn.cached > self.speed.room:
                return
            self.waiting.popleft()
            turn.end = self._got + turn.sampled
            self._cached += turn.cached
            self._debt += self.speed.per_prompt_token * turn.prefill
            heapq.heappush(self._running, (turn.end, next(self._numbers), turn))

    def _replan(self) -> None:
        self._plan += 1
        if self._running and not self._paused:
            plan = self._plan
            left = max(0.0, self._running[0][0] - self._got)
            self.clock.after(self._debt + left * self._iteration(), lambda: self._end(plan))

    def _end(self, plan: int) -> None:
        """End the turn that ends first, unless something else has happened after this was planned."""
        if plan != self._plan:
            return
        self._settle()
        _, _, turn = heapq.heappop(self._running)
        self._cached -= turn.cached
        self._begin()
        self._replan()
        turn.then()
