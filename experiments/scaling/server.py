"""A server of an engine: turns share it, token by token."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from clock import Clock


@dataclass(frozen=True)
class Speed:
    """What one server can do; a roofline of reading weights and cached keys, and of arithmetic."""

    fixed: float
    """Seconds of an iteration that samples nothing but a token: the weights are read, kernels are started."""
    per_cached_token: float
    """Further seconds for each token whose keys and values are read."""
    per_turn: float
    """Least seconds of arithmetic for each turn that is sampled at the same time."""
    per_prompt_token: float
    """Seconds of each token that is prefilled."""
    slots: int
    """Turns at once."""
    room: float
    """Tokens whose keys and values fit."""

    def iteration(self, turns: int, cached: float) -> float:
        """Seconds in which each of so many turns gets a token."""
        return max(self.fixed + self.per_cached_token * cached, self.per_turn * turns)


@dataclass(eq=False)
class Asked:
    """A turn that is to be sampled."""

    prefill: int
    """Tokens of the prompt that are not cached."""
    context: int
    """Tokens of the whole prompt."""
    sampled: int
    then: Callable[[], None]
    end: float = 0.0
    """Tokens that each turn of this server will have got by then, since the beginning."""

    @property
    def cached(self) -> float:
        """Tokens with keys and values, in the mean over the turn."""
        return self.context + self.sampled / 2


class Server:
    """Samples for all its turns at once. A prefill stops the others; those beyond the places wait in order."""

    def __init__(self, clock: Clock, speed: Speed):
        self.clock, self.speed = clock, speed
        self.waiting: deque[Asked] = deque()
        self.busy = 0.0
        """Seconds in which it did something."""
        self._running: list[tuple[float, int, Asked]] = []
        self._cached, self._got, self._debt, self._since = 0.0, 0.0, 0.0, 0.0
        self._paused, self._plan, self._numbers = False, 0, count()

    @property
    def load(self) -> int:
        """Turns that it has."""
        return len(self._running) + len(self.waiting)

    def ask(self, turn: Asked) -> None:
        """Its `then` is called when the turn is over."""
        self._settle()
        self.waiting.append(turn)
        self._begin()
        self._replan()

    def drop(self, turn: Asked) -> None:
        """Nobody wants it any more; nothing happens where it is over."""
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
        """Nothing is sampled until `resume`."""
        self._settle()
        self._paused = True
        self._replan()

    def resume(self) -> None:
        """Go on by new weights: all keys and values are computed anew."""
        self._settle()
        self._paused = False
        self._debt += self.speed.per_prompt_token * self._cached
        self._begin()
        self._replan()

    def _settle(self) -> None:
        """Book the time since this was last called: first what is to be prefilled, then tokens for all."""
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
        """Give places to those who wait."""
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
        """The turn that is over first, unless something else has happened since this was planned."""
        if plan != self._plan:
            return
        self._settle()
        _, _, turn = heapq.heappop(self._running)
        self._cached -= turn.cached
        self._begin()
        self._replan()
        turn.then()
