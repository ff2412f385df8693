"""The task of a mixture, made of the tasks of its sources. The id of a row begins with the name of its source, and that
name selects the environment, the scorer and every other function of a family."""

from __future__ import annotations

import inspect
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import chain, zip_longest
from typing import Any, TypeVar

from mtrl.config.mixture import row_id, source_of
from mtrl.datasets import Splits
from mtrl.environments.base import BaseEnvironment, TakesMessages
from mtrl.environments.family import Demonstrator, Family
from mtrl.types import Message, Row, Trajectory

T = TypeVar("T")

NAME = "mixture"
"""Name of the family of a mixture."""


def interleaved(lists: Sequence[Sequence[T]]) -> list[T]:
    """Return the first items of all lists, then the second items, and so on, so that the first n items hold equally
    many of each list until a list ends."""
    missing = object()
    rounds = chain.from_iterable(zip_longest(*lists, fillvalue=missing))
    return [item for item in rounds if item is not missing]  # type: ignore[misc]


def mixed_splits(splits: Mapping[str, Splits]) -> Splits:
    """Return the rows of all sources, interleaved, with ids that begin with the name of their source. The held-out rows
    of each source are those of a run of its own; `validation` has none if no source has any."""

    def mixed(of: Callable[[Splits], list[Row]]) -> list[Row]:
        named = ([row | {"id": row_id(name, row["id"])} for row in of(own)] for name, own in splits.items())
        return interleaved(list(named))

    validates = any(own.validation for own in splits.values())
    return Splits(
        train=mixed(lambda own: own.train),
        test=mixed(lambda own: own.test),
        validation=mixed(lambda own: own.held_out) if validates else [],
    )


def mixed_family(families: Mapping[str, Family]) -> Family:
    """Return a family whose functions call those of the source of the row.

    `demonstrate` and `gold` exist if every source has them; `answered`, `explain` and `measure` if any source has them,
    and a source without them counts as a task that cannot tell. The tokens are those of all sources.
    """

    def chosen(function: str, row: Row) -> Any:
        return getattr(families[source_of(str(row["id"]))], function)

    def score(trajectory: Trajectory, row: Row) -> float:
        return chosen("score", row)(trajectory, row)

    def demonstrate(row: Row, rng: random.Random) -> Demonstrator:
        return chosen("demonstrate", row)(row, rng)

    def gold(row: Row) -> Sequence[str]:
        return chosen("gold", row)(row)

    def optional(function: str, otherwise: Any) -> Callable[[Trajectory, Row], Any] | None:
        def call(trajectory: Trajectory, row: Row) -> Any:
            own = chosen(function, row)
            return otherwise if own is None else own(trajectory, row)

        return call if any(getattr(family, function) for family in families.values()) else None

    everyone = list(families.values())
    return Family(
        name=NAME,
        environment=MixedEnvironment,
        load=_no_loader,
        score=score,
        demonstrate=demonstrate if all(family.demonstrate for family in everyone) else None,
        gold=gold if all(family.gold for family in everyone) else None,
        answered=optional("answered", None),
        explain=optional("explain", None),
        measure=optional("measure", {}),
        waits_for_processes=all(family.waits_for_processes for family in everyone),
        tokens=tuple(dict.fromkeys(token for family in everyone for token in family.tokens)),
    )


class MixedEnvironment(BaseEnvironment):
    """The environment of one episode of a mixture: `reset` makes the environment of the row's source, whose methods
    become those of this object."""

    def __init__(self, makers: Mapping[str, Callable[[], BaseEnvironment]], max_turns: int):
        super().__init__(max_turns)
        self._makers, self._closed = makers, False

    def reset(self, row: Row | None = None) -> Any:
        """Start the episode of `row` in the environment of its source."""
        assert row is not None
        own: Any = self._makers[source_of(str(row["id"]))]()
        if self._closed:  # the call took too long, so the caller has closed this object already
            return own.close()
        self.close, self.step, self.truncate = own.close, own.step, own.truncate  # type: ignore[method-assign]
        opening: Any = own.reset(row)
        if inspect.isawaitable(opening):
            return self._offer_later(own, opening)
        self._offer(own)
        return opening

    def close(self) -> None:
        """Release nothing, since the environment is not made yet; `reset` replaces this method by its own."""
        self._closed = True
        super().close()

    async def _offer_later(self, own: Any, opening: Awaitable[list[Message] | None]) -> list[Message] | None:
        found = await opening
        self._offer(own)
        return found

    def _offer(self, own: Any) -> None:
        """Offer the tools that the environment has after its `reset`, if it takes messages (`TakesMessages`)."""
        self.max_turns = own.max_turns
        if isinstance(own, TakesMessages):
            self.tools, self.respond = own.tools, own.respond


def _no_loader(*args: Any, **config: Any) -> Splits:
    """Stand for the loader of a mixture, whose sources load their own rows."""
    raise RuntimeError("a mixture has no loader of its own; `load_task` loads its sources")
