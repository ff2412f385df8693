"""The leader calls, every rank does its share."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from mtrl.distributed.ending import GRACE
from mtrl.distributed.world import World
from mtrl.errors import JobLost, UserError
from mtrl.trainer.interrupt import Relay


@dataclass(frozen=True)
class Order:
    """One call of a method of every rank's worker."""

    method: str
    common: tuple[Any, ...]
    """Arguments that are the same on every rank, after the rank's own."""
    has_shares: bool


@dataclass(frozen=True)
class Outcome:
    """What became of it on one rank."""

    value: Any = None
    refusal: str | None = None
    """The sentence of a `UserError`."""


class Crew:
    """Ranks that each hold a worker, an object of the same class, and do the same with it at the same time::

        crew = Crew(world, Learner(...))
        if not world.is_leader:
            crew.follow()
        else:
            reports = crew.run("update", shares)  # every rank: worker.update(*share)
            crew.dismiss()
        world.close()

    Alone, `run` calls the worker, and nothing is copied.
    """

    def __init__(self, world: World, worker: Any):
        self.world, self.worker = world, worker
        self._lock = threading.Lock()
        self._is_dismissed = False

    def run(self, method: str, shares: Sequence[tuple] | None = None, *common: Any) -> list[Any]:
        """The leader's: call `worker.method(*share, *common)` on every rank; the results by rank.

        May be called from any thread; one call runs after the other.

        Args:
            method: name of a method of the worker.
            shares: for every rank its own first arguments; None: there are only common ones.
            common: arguments that are the same for all.

        Raises:
            UserError: a worker raised it, on whichever rank (the lowest if several did). The crew can be called again,
                provided that no other rank waits for that one in the middle of its work.
            JobLost: a rank is gone or has failed.
            Exception: what the leader's own worker raised; the others are told, and end.
        """
        if shares is not None and len(shares) != self.world.size:
            raise ValueError(f"{self.world.size} ranks need a share each, and there are {len(shares)}")
        order = Order(method, common, shares is not None)
        with self._lock:
            if self.world.size == 1:
                return [self._call(order, shares[0] if shares else ())]
            with self.world.telling():
                outcomes = self._take_part(self.world.broadcast(order), shares)
        refusals = [outcome.refusal for outcome in outcomes if outcome.refusal is not None]
        if refusals:
            raise UserError(refusals[0])
        return [outcome.value for outcome in outcomes]

    def follow(self) -> None:
        """A follower's: do what the leader calls, until it dismisses the crew.

        Signals that ask to stop are passed on to the leader, which saves and then dismisses the crew.

        Raises:
            JobLost: the leader or another rank is gone, or a method raised something else than `UserError`.
        """
        if self.world.links is None:
            return
        with Relay(self.world.links.lifeline.pass_on), self.world.telling():
            while (order := self._listen()) is not None:
                self._take_part(order, None)

    def _listen(self) -> Order | None:
        """The next order; None: the crew is dismissed."""
        nothing: Order | None = None
        return self.world.broadcast(nothing)

    def dismiss(self) -> None:
        """The leader's: let the followers go. Does nothing the second time, and never fails."""
        if self.world.links is None or self._is_dismissed:
            return
        self._is_dismissed = True
        # A call that still runs in another thread is not waited for long: the ranks that it leaves end by themselves.
        if self._lock.acquire(timeout=GRACE):
            try:
                with suppress(JobLost):
                    self.world.broadcast(None)
            finally:
                self._lock.release()
        self.world.links.lifeline.close()

    def _take_part(self, order: Order, shares: Sequence[tuple] | None) -> list[Outcome]:
        """This rank's part of a call; the outcomes of all, on the leader."""
        share = self.world.scatter(shares) if order.has_shares else ()
        try:
            outcome = Outcome(self._call(order, share))
        except UserError as error:
            outcome = Outcome(refusal=str(error))
        return self.world.gather(outcome) or []

    def _call(self, order: Order, share: tuple) -> Any:
        return getattr(self.worker, order.method)(*share, *order.common)
