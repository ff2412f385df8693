"""Which replica samples which turn, and which turns wait."""

from __future__ import annotations

import asyncio
from bisect import insort
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

SPREAD = 8
"""A group begins on one replica, so that its prompt is prefilled once, until that has so many trajectories more than
the replica with the fewest."""


@dataclass
class Lane:
    """What goes to one replica."""

    serving: bool = False
    """Whether it may be given turns."""
    homed: int = 0
    """Open trajectories whose conversation it has in its cache."""
    busy: set[Ticket] = field(default_factory=set)
    """Turns on their way there."""


@dataclass(eq=False)
class Ticket:
    """A turn that wants a place."""

    number: int
    trajectory_id: str
    avoid: int | None
    place: asyncio.Future[int]


@dataclass
class _Group:
    home: int
    open: int = 0
    """Trajectories that have begun and are not released."""


class Router:
    """Gives each turn a place on a replica, at most `limit` on each; whoever comes beyond that waits, in order.

    A trajectory stays where its conversation is cached, and the trajectories of a group begin on the same replica. No
    cache is worth an idle replica: a turn moves where its own replica has more than `slack` turns beyond the least
    busy one. So while a turn waits, every replica that it may go to has at least `limit - slack`. All calls are made
    on one event loop; `restart` says that there is a new one.
    """

    def __init__(self, lanes: Sequence[Lane], limit: int):
        self.lanes, self.limit = lanes, limit
        self.slack = max(SPREAD, limit // 4)
        self._homes: dict[str, int] = {}
        self._groups: dict[str, _Group] = {}
        self._waiting: list[Ticket] = []
        self._held = 0
        self.error: Exception | None = None
        """Why nobody gets a place any more."""
        self._idle = asyncio.Event()

    @property
    def waiting(self) -> int:
        """Turns that have no place yet."""
        return len(self._waiting)

    @property
    def serving(self) -> list[int]:
        """Replicas that may be given turns."""
        return [i for i, lane in enumerate(self.lanes) if lane.serving]

    def restart(self) -> None:
        """Forget what the last event loop left; conversations stay where they are."""
        self._waiting, self._held, self._idle = [], 0, asyncio.Event()
        for lane in self.lanes:
            lane.busy.clear()

    @asynccontextmanager
    async def place(self, trajectory_id: str, number: int, avoid: int | None = None) -> AsyncIterator[int]:
        """Wait for a place, and hold it; gives the index of the replica.

        Args:
            number: of the turn; the lowest one that waits comes first.
            avoid: a replica that is taken only where no other has a place.
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
        """The trajectory is over."""
        home = self._homes.pop(trajectory_id, None)
        if home is None:
            return
        self.lanes[home].homed -= 1
        group = self._groups[_group_of(trajectory_id)]
        group.open -= 1
        if not group.open:
            del self._groups[_group_of(trajectory_id)]

    def hold(self) -> None:
        """Give no more places until `go_on` was called as often."""
        self._held += 1

    def go_on(self) -> None:
        self._held -= 1
        self.dispatch()

    async def idle(self) -> None:
        """Wait until no turn is on its way."""
        while any(lane.busy for lane in self.lanes):
            self._idle.clear()
            await self._idle.wait()

    def fail(self, error: Exception) -> None:
        """Nobody gets a place any more, and whoever waits hears of it."""
        self.error = error
        for ticket in self._waiting:
            if not ticket.place.done():
                ticket.place.set_exception(error)
        self._waiting = []

    def dispatch(self) -> None:
        """Give the places that there are. To be called when a replica serves again."""
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
        """The replica for this turn, or None where it waits; at least one serves."""
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
        """Where a trajectory begins that has no home, or none that serves."""
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
    """`group/index` is a trajectory."""
    return trajectory_id.rpartition("/")[0]
