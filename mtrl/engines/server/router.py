"""The assignment of turns to replicas, with a queue of waiting turns."""

from __future__ import annotations

import asyncio
from bisect import insort
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

GROUP_SLACK = 8
"""Number of trajectories by which one replica may exceed the replica with the fewest before a group moves away from it.
Until then, the trajectories of a group begin on one replica, so that their prompt is prefilled once."""


@dataclass
class ReplicaLoad:
    """The turns and trajectories of one replica."""

    serving: bool = False
    """Whether the replica accepts turns."""
    trajectories: int = 0
    """Number of open trajectories whose conversation is in the cache of the replica."""
    busy: set[WaitingTurn] = field(default_factory=set)
    """Turns in flight to the replica."""


@dataclass(eq=False)
class WaitingTurn:
    """A turn that needs a slot on a replica."""

    number: int
    trajectory_id: str
    avoid: int | None
    slot: asyncio.Future[int]
    """Index of the replica, once the turn has a slot."""


@dataclass
class _Group:
    home: int
    open: int = 0
    """Number of trajectories that have begun and are not released."""


class Router:
    """Gives each turn a slot on a replica, with at most `limit` turns per replica. Further turns wait in a queue.

    A trajectory stays on the replica where its conversation is cached, and the trajectories of a group begin on the
    same replica. A turn moves to the least busy replica if its own replica has more than `slack` turns more than that
    one, since the cache is not worth an idle replica. Therefore, while a turn waits, every replica that it may go to
    has at least `limit - slack` turns. All calls must be made on one event loop; call `restart` for a new one.
    """

    def __init__(self, loads: Sequence[ReplicaLoad], limit: int):
        self.loads, self.limit = loads, limit
        self.slack = max(GROUP_SLACK, limit // 4)
        self._homes: dict[str, int] = {}
        self._groups: dict[str, _Group] = {}
        self._waiting: list[WaitingTurn] = []
        self._pauses = 0
        self.error: Exception | None = None
        """Error that every further turn raises; None while the router works."""
        self._idle = asyncio.Event()

    @property
    def waiting(self) -> int:
        """Number of turns in the queue."""
        return len(self._waiting)

    @property
    def serving(self) -> list[int]:
        """Indices of the replicas that accept turns."""
        return [i for i, load in enumerate(self.loads) if load.serving]

    def restart(self) -> None:
        """Discard the turns of the last event loop. Trajectories stay assigned to their replicas."""
        self._waiting, self._pauses, self._idle = [], 0, asyncio.Event()
        for load in self.loads:
            load.busy.clear()

    @asynccontextmanager
    async def slot(self, trajectory_id: str, number: int, avoid: int | None = None) -> AsyncIterator[int]:
        """Wait for a slot and hold it during the context, which yields the index of the replica.

        Args:
            number: number of the turn; the waiting turn with the lowest number comes first.
            avoid: index of a replica that is used only if no other replica has a free slot.
        """
        if self.error is not None:
            raise self.error
        turn = WaitingTurn(number, trajectory_id, avoid, asyncio.get_running_loop().create_future())
        insort(self._waiting, turn, key=lambda waiting: waiting.number)
        self.dispatch()
        try:
            yield await turn.slot
        finally:
            self._free(turn)

    def release(self, trajectory_id: str) -> None:
        """End a trajectory: its replica no longer counts it, and its waiting turns are cancelled."""
        for turn in self._waiting:
            if turn.trajectory_id == trajectory_id:
                turn.slot.cancel()  # else a slot that becomes free would assign the trajectory again
        home = self._homes.pop(trajectory_id, None)
        if home is None:
            return
        self.loads[home].trajectories -= 1
        group = self._groups[_group_of(trajectory_id)]
        group.open -= 1
        if not group.open:
            del self._groups[_group_of(trajectory_id)]

    def pause(self) -> None:
        """Assign no more slots until `resume` was called as often as `pause`."""
        self._pauses += 1

    def resume(self) -> None:
        self._pauses -= 1
        self.dispatch()

    async def idle(self) -> None:
        """Wait until no turn is in flight."""
        while any(load.busy for load in self.loads):
            self._idle.clear()
            await self._idle.wait()

    def fail(self, error: Exception) -> None:
        """Assign no more slots; waiting and further turns raise `error`."""
        self.error = error
        for turn in self._waiting:
            if not turn.slot.done():
                turn.slot.set_exception(error)
        self._waiting = []

    def dispatch(self) -> None:
        """Assign the free slots to waiting turns. Call this when a replica accepts turns again."""
        if self._pauses or not self._waiting:
            return
        left = []
        for i, turn in enumerate(self._waiting):
            if all(len(self.loads[index].busy) >= self.limit for index in self.serving):
                left += self._waiting[i:]
                break
            if turn.slot.done():
                continue  # cancelled just now
            if (index := self._choose(turn)) is None:
                left.append(turn)
            else:
                self.loads[index].busy.add(turn)
                turn.slot.set_result(index)
        self._waiting = left

    def _choose(self, turn: WaitingTurn) -> int | None:
        """Return the index of the replica for this turn, or None if the turn must wait. At least one replica must
        accept turns."""
        others = [i for i in self.serving if i != turn.avoid]
        options = others if any(len(self.loads[i].busy) < self.limit for i in others) else self.serving
        home = self._homes.get(turn.trajectory_id)
        target = home if home in options else self._first_replica(turn.trajectory_id, options)
        least = min(options, key=lambda i: len(self.loads[i].busy))
        if len(self.loads[target].busy) - len(self.loads[least].busy) > self.slack:
            target = least
        self._assign(turn.trajectory_id, target)
        return target if len(self.loads[target].busy) < self.limit else None

    def _first_replica(self, trajectory_id: str, options: Sequence[int]) -> int:
        """Return the index of the replica for a trajectory without a replica among `options`."""
        fewest = min(options, key=lambda i: (self.loads[i].trajectories, len(self.loads[i].busy)))
        group = self._groups.setdefault(_group_of(trajectory_id), _Group(fewest))
        if (
            group.home not in options
            or self.loads[group.home].trajectories >= self.loads[fewest].trajectories + GROUP_SLACK
        ):
            group.home = fewest
        return group.home

    def _assign(self, trajectory_id: str, replica: int) -> None:
        home = self._homes.get(trajectory_id)
        if home is None:
            self._groups.setdefault(_group_of(trajectory_id), _Group(replica)).open += 1
        else:
            self.loads[home].trajectories -= 1
        self._homes[trajectory_id] = replica
        self.loads[replica].trajectories += 1

    def _free(self, turn: WaitingTurn) -> None:
        if not turn.slot.done() or turn.slot.cancelled():
            self._waiting = [waiting for waiting in self._waiting if waiting is not turn]
        for load in self.loads:
            load.busy.discard(turn)
        if not any(load.busy for load in self.loads):
            self._idle.set()
        self.dispatch()


def _group_of(trajectory_id: str) -> str:
    """Return the group id of a trajectory id `group/index`."""
    return trajectory_id.rpartition("/")[0]
