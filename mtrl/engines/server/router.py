"""The assignment of turns to replicas, with a queue of waiting turns."""

from __future__ import annotations

import asyncio
from bisect import insort
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

SPREAD = 8
"""Number of trajectories by which one replica may exceed the replica with the fewest before a group moves away from it.
Until then, the trajectories of a group begin on one replica, so that their prompt is prefilled once."""


@dataclass
class Lane:
    """The turns and trajectories of one replica."""

    serving: bool = False
    """Whether the replica accepts turns."""
    homed: int = 0
    """Number of open trajectories whose conversation is in the cache of the replica."""
    busy: set[Ticket] = field(default_factory=set)
    """Turns in flight to the replica."""


@dataclass(eq=False)
class Ticket:
    """A turn that needs a place on a replica."""

    number: int
    trajectory_id: str
    avoid: int | None
    place: asyncio.Future[int]


@dataclass
class _Group:
    home: int
    open: int = 0
    """Number of trajectories that have begun and are not released."""


class Router:
    """Gives each turn a place on a replica, with at most `limit` turns per replica. Further turns wait in a queue.

    A trajectory stays on the replica where its conversation is cached, and the trajectories of a group begin on the
    same replica. A turn moves to the least busy replica if its own replica has more than `slack` turns more than that
    one, since the cache is not worth an idle replica. Therefore, while a turn waits, every replica that it may go to
    has at least `limit - slack` turns. All calls must be made on one event loop; call `restart` for a new one.
    """

    def __init__(self, lanes: Sequence[Lane], limit: int):
        self.lanes, self.limit = lanes, limit
        self.slack = max(SPREAD, limit // 4)
        self._homes: dict[str, int] = {}
        self._groups: dict[str, _Group] = {}
        self._waiting: list[Ticket] = []
        self._held = 0
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
        return [i for i, lane in enumerate(self.lanes) if lane.serving]

    def restart(self) -> None:
        """Discard the turns of the last event loop. Trajectories stay assigned to their replicas."""
        self._waiting, self._held, self._idle = [], 0, asyncio.Event()
        for lane in self.lanes:
            lane.busy.clear()

    @asynccontextmanager
    async def place(self, trajectory_id: str, number: int, avoid: int | None = None) -> AsyncIterator[int]:
        """Wait for a place, and hold it during the context, which yields the index of the replica.

        Args:
            number: number of the turn; the waiting turn with the lowest number comes first.
            avoid: index of a replica that is used only if no other replica has a free place.
        """
        if self.error is not None:
            raise self.error
        ticket = Ticket(number, trajectory_id, avoid, asyncio.get_running_loop().create_future())
        insort(self._waiting, ticket, key=lambda waiting: waiting.number)
        self.dispatch()
        try:
            yield await ticket.place
        finally:
            self._leave(ticket)

    def release(self, trajectory_id: str) -> None:
        """End a trajectory: its replica no longer counts it."""
        home = self._homes.pop(trajectory_id, None)
        if home is None:
            return
        self.lanes[home].homed -= 1
        group = self._groups[_group_of(trajectory_id)]
        group.open -= 1
        if not group.open:
            del self._groups[_group_of(trajectory_id)]

    def hold(self) -> None:
        """Assign no more places until `go_on` was called as often as `hold`."""
        self._held += 1

    def go_on(self) -> None:
        self._held -= 1
        self.dispatch()

    async def idle(self) -> None:
        """Wait until no turn is in flight."""
        while any(lane.busy for lane in self.lanes):
            self._idle.clear()
            await self._idle.wait()

    def fail(self, error: Exception) -> None:
        """Assign no more places; waiting and further turns raise `error`."""
        self.error = error
        for ticket in self._waiting:
            if not ticket.place.done():
                ticket.place.set_exception(error)
        self._waiting = []

    def dispatch(self) -> None:
        """Assign the free places to waiting turns. Call this when a replica accepts turns again."""
        if self._held or not self._waiting:
            return
        left = []
        for i, ticket in enumerate(self._waiting):
            if all(len(self.lanes[lane].busy) >= self.limit for lane in self.serving):
                left += self._waiting[i:]
                break
            if ticket.place.done():
                continue  # cancelled just now
            if (place := self._choose(ticket)) is None:
                left.append(ticket)
            else:
                self.lanes[place].busy.add(ticket)
                ticket.place.set_result(place)
        self._waiting = left

    def _choose(self, ticket: Ticket) -> int | None:
        """Return the index of the replica for this turn, or None if the turn must wait. At least one replica must
        accept turns."""
        others = [i for i in self.serving if i != ticket.avoid]
        options = others if any(len(self.lanes[i].busy) < self.limit for i in others) else self.serving
        home = self._homes.get(ticket.trajectory_id)
        target = home if home in options else self._beginning(ticket.trajectory_id, options)
        least = min(options, key=lambda i: len(self.lanes[i].busy))
        if len(self.lanes[target].busy) - len(self.lanes[least].busy) > self.slack:
            target = least
        self._settle(ticket.trajectory_id, target)
        return target if len(self.lanes[target].busy) < self.limit else None

    def _beginning(self, trajectory_id: str, options: Sequence[int]) -> int:
        """Return the index of the replica for a trajectory without a replica among `options`."""
        fewest = min(options, key=lambda i: (self.lanes[i].homed, len(self.lanes[i].busy)))
        group = self._groups.setdefault(_group_of(trajectory_id), _Group(fewest))
        if group.home not in options or self.lanes[group.home].homed >= self.lanes[fewest].homed + SPREAD:
            group.home = fewest
        return group.home

    def _settle(self, trajectory_id: str, replica: int) -> None:
        home = self._homes.get(trajectory_id)
        if home is None:
            self._groups.setdefault(_group_of(trajectory_id), _Group(replica)).open += 1
        else:
            self.lanes[home].homed -= 1
        self._homes[trajectory_id] = replica
        self.lanes[replica].homed += 1

    def _leave(self, ticket: Ticket) -> None:
        if not ticket.place.done() or ticket.place.cancelled():
            self._waiting = [waiting for waiting in self._waiting if waiting is not ticket]
        for lane in self.lanes:
            lane.busy.discard(ticket)
        if not any(lane.busy for lane in self.lanes):
            self._idle.set()
        self.dispatch()


def _group_of(trajectory_id: str) -> str:
    """Return the group id of a trajectory id `group/index`."""
    return trajectory_id.rpartition("/")[0]
