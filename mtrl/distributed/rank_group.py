"""Calls of a method on all ranks, started by the leader."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from mtrl.distributed.ending import GRACE
from mtrl.distributed.world import World
from mtrl.errors import JobLost, UserError
from mtrl.utils.signals import Relay


@dataclass(frozen=True)
class Order:
    """One call of a method of the worker of each rank."""

    method: str
    """Name of the method, with dots for a method of a part of the worker."""
    common: tuple[Any, ...]
    """Arguments that are the same on every rank; they follow the rank's own arguments."""
    has_shares: bool


@dataclass(frozen=True)
class RankResult:
    """Result of a call on one rank."""

    value: Any = None
    refusal: str | None = None
    """Message of the `UserError` that the worker raised; None if it raised none."""


class RankGroup:
    """Ranks that each hold a worker, an object of the same class, and call the same methods of it at the same time::

        rank_group = RankGroup(world, Learner(...))
        if not world.is_leader:
            rank_group.follow()
        else:
            reports = rank_group.run("update", shares)  # every rank: worker.update(*share)
            rank_group.dismiss()
        world.close()

    With a single rank, `run` calls the worker directly and copies nothing.
    """

    def __init__(self, world: World, worker: Any):
        self.world, self.worker = world, worker
        self._lock = threading.Lock()
        self._is_dismissed = False

    def run(self, method: str, shares: Sequence[tuple] | None = None, *common: Any) -> list[Any]:
        """Call `worker.method(*share, *common)` on every rank and return the results, in the order of ranks. Only the
        leader calls this.

        It may be called from any thread; concurrent calls run one after another.

        Args:
            method: name of a method of the worker, or of one of its parts: `critic.update`.
            shares: the first arguments of each rank; None: there are only common arguments.
            common: arguments that are the same for all ranks.

        Raises:
            UserError: a worker raised it, on any rank (of several, that of the lowest rank). The group can be called
                again, provided that no other rank waits for that rank in the middle of the call.
            JobLost: a rank is lost or has failed.
            Exception: the exception that the leader's own worker raised; the other ranks are notified and end.
        """
        if shares is not None and len(shares) != self.world.size:
            raise ValueError(f"{self.world.size} ranks need a share each, and there are {len(shares)}")
        order = Order(method, common, shares is not None)
        with self._lock:
            if self._is_dismissed:
                raise RuntimeError(f"the ranks were dismissed before {method}")
            if self.world.size == 1:
                return [self._call(order, shares[0] if shares else ())]
            with self.world.reporting_errors():
                outcomes = self._take_part(self.world.broadcast(order), shares)
        refusals = [outcome.refusal for outcome in outcomes if outcome.refusal is not None]
        if refusals:
            raise UserError(refusals[0])
        return [outcome.value for outcome in outcomes]

    def follow(self) -> None:
        """Execute the leader's calls until it dismisses the rank group. Only followers call this.

        Signals that ask to stop are forwarded to the leader, which saves and then dismisses the rank group.

        Raises:
            JobLost: the leader or another rank is lost, or a method raised another exception than `UserError`.
        """
        if self.world.links is None:
            return
        with Relay(self.world.links.lifeline.pass_on), self.world.reporting_errors():
            while (order := self._listen()) is not None:
                self._take_part(order, None)

    def _listen(self) -> Order | None:
        """Return the next order; None when the rank group is dismissed."""
        nothing: Order | None = None
        return self.world.broadcast(nothing)

    def dismiss(self) -> None:
        """End the followers. Only the leader calls this. A second call has no effect, and no call raises."""
        if self.world.links is None or self._is_dismissed:
            return
        self._is_dismissed = True
        # The wait for a call in another thread is limited, since without the leader the other ranks end themselves.
        if self._lock.acquire(timeout=GRACE):
            try:
                with suppress(JobLost):
                    self.world.broadcast(None)
            finally:
                self._lock.release()
        self.world.links.lifeline.close()

    def _take_part(self, order: Order, shares: Sequence[tuple] | None) -> list[RankResult]:
        """Execute this rank's part of a call; return the outcomes of all ranks on the leader, an empty list on
        others."""
        share = self.world.scatter(shares) if order.has_shares else ()
        try:
            outcome = RankResult(self._call(order, share))
        except UserError as error:
            outcome = RankResult(refusal=str(error))
        return self.world.gather(outcome) or []

    def _call(self, order: Order, share: tuple) -> Any:
        return attrgetter(order.method)(self.worker)(*share, *order.common)
