"""The Python interpreter of a process: of rank 0, whose event loop and thread of the updates share it, or of a rollout
worker."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

from clock import Clock

LOOP, DESK = "loop", "desk"
"""The event loop runs episodes, logs steps and calls servers; the other thread updates the policy
(`mtrl/trainer/work_thread.py`)."""


@dataclass
class Work:
    kind: str
    left: float
    """CPU seconds that are left."""
    then: Callable[[], None]


class Interpreter:
    """Each lane does one piece of work after the other. While both have work, each gets half of the interpreter."""

    def __init__(self, clock: Clock):
        self.clock = clock
        self.spent: Counter[str] = Counter()
        """CPU seconds by kind of work."""
        self._lanes: dict[str, deque[Work]] = {LOOP: deque(), DESK: deque()}
        self._since, self._plan = 0.0, 0

    def do(self, lane: str, kind: str, seconds: float, then: Callable[[], None]) -> None:
        """Add work of so many CPU seconds to the end of a lane, and call `then` when it is done."""
        if not seconds:
            then()
            return
        self.settle()
        self._lanes[lane].append(Work(kind, seconds, then))
        self._replan()

    def settle(self) -> None:
        """Add the time since the last call to `spent` and to the running work."""
        heads = [lane[0] for lane in self._lanes.values() if lane]
        for head in heads:
            share = (self.clock.now - self._since) / len(heads)
            head.left -= share
            self.spent[head.kind] += share
        self._since = self.clock.now

    def _replan(self) -> None:
        heads = [lane[0] for lane in self._lanes.values() if lane]
        self._plan += 1
        if heads:
            plan = self._plan
            soonest = max(0.0, min(head.left for head in heads)) * len(heads)
            self.clock.after(soonest, lambda: self._end(plan))

    def _end(self, plan: int) -> None:
        """End the work that is done first, unless work was added after this was planned."""
        if plan != self._plan:
            return
        self.settle()
        lane = min((lane for lane in self._lanes.values() if lane), key=lambda lane: lane[0].left)
        done = lane.popleft()
        self._replan()
        done.then()
