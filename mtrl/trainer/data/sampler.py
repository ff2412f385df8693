"""Samplers of training rows (`data.sampler`): the row of each new group."""

from __future__ import annotations

import inspect
import json
import random
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from mtrl.config.schema import DataConfig
from mtrl.errors import UserError
from mtrl.rollout.pauses import Pauses
from mtrl.types import Row
from mtrl.utils.user_code import load_function, reason


class Sampler(ABC):
    """An endless sequence of training rows. A subclass implements `choose`, and may use the results that `note` gets.

    The order must depend only on the rows, the seed, `drawn` and the state, so that a resumed run draws the same rows.
    """

    def __init__(self, rows: Sequence[Row], seed: int):
        """A subclass takes the keys of `data.sampler_config` as additional keyword arguments."""
        self.rows, self.seed = rows, seed
        self.drawn = 0
        """Number of rows drawn so far."""
        self.pauses: Pauses | None = None
        """Pauses of the sources of a mixture; None for rows of one task."""

    @abstractmethod
    def choose(self) -> int:
        """Return the index in `rows` of the row for draw number `drawn` (from 0)."""

    def note(self, row: Row, success: float) -> None:  # noqa: B027
        """Take the result of a group on `row`: the share of its episodes that succeeded by the scorer, 0 to 1."""

    def state(self) -> dict[str, Any]:
        """Return everything besides `drawn` that determines the next rows, as values that can be written as JSON. Later
        calls of other methods must not change the returned dict."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:  # noqa: B027
        """Continue from `state`; `drawn` is set already. `state` is empty if the run had another sampler before."""

    def metrics(self) -> dict[str, float]:
        """Return metrics of the current state, named `data/…`."""
        return {}

    def settings(self) -> dict[str, Any]:
        """Return settings that the statistics of rows need: `band` (lowest and highest running success of the rows to
        keep) and `forgetting`, if the sampler has them; see `DifficultySampler`."""
        return {}

    def described(self) -> dict[str, dict[str, Any]]:
        """Return the class, the number of rows and the `settings` of the sampler of each source, by name; the name is
        empty for rows of one task."""
        return {"": {"sampler": type(self).__name__, "rows": len(self.rows), **self.settings()}}

    def next(self) -> Row:
        """Return the next row.

        Raises:
            UserError: `choose` returned no index of a row.
        """
        return self.rows[self.next_index()]

    def next_index(self) -> int:
        """Return the index of the next row; see `next`."""
        index = self.choose()
        if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < len(self.rows):
            raise UserError(
                f"data.sampler: {type(self).__name__}.choose returned {index!r:.60}; it must return the index of "
                f"one of the {len(self.rows)} training rows, from 0"
            )
        self.drawn += 1
        return index


class Shuffled:
    """The indices 0 to `count` - 1 in passes, each with another order, which depends only on `seed` and the pass."""

    def __init__(self, count: int, seed: int | str):
        self.count, self.seed = count, seed
        self._order: tuple[int, list[int]] = (-1, [])

    def at(self, position: int) -> int:
        """Return the index at a position of the endless sequence of passes."""
        epoch, place = divmod(position, self.count)
        if self._order[0] != epoch:
            order = list(range(self.count))
            random.Random(f"{self.seed}/{epoch}").shuffle(order)
            self._order = (epoch, order)
        return self._order[1][place]


class RowStream(Sampler):
    """`uniform`: every row once in each pass. The whole state is `drawn`."""

    def __init__(self, rows: Sequence[Row], seed: int):
        super().__init__(rows, seed)
        self._order = Shuffled(len(rows), seed)

    def choose(self) -> int:
        return self._order.at(self.drawn)


class DifficultySampler(Sampler):
    """`difficulty`: the order of `uniform`, without the rows whose running success lies outside of a band.

    The running success of a row is the mean success of its groups, where each group multiplies the weight of all
    earlier ones by 1 - `forgetting`. Rows without a result are inside the band. A row outside is drawn with probability
    `exploration` each time its turn comes, so that its result follows the policy. If a whole pass contains no row to
    draw, the next row is drawn anyway.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        seed: int,
        *,
        band: Sequence[float] = (0.1, 0.9),
        forgetting: float = 0.5,
        exploration: float = 0.1,
    ):
        """`band`: lowest and highest running success of the rows to keep, both included.

        Raises:
            UserError: the band is not two increasing numbers from 0 to 1, or another number is not from 0 to 1.
        """
        super().__init__(rows, seed)
        numbers = list(band) if isinstance(band, Sequence) and not isinstance(band, str) else []
        if len(numbers) != 2 or not all(map(_is_share, numbers)) or numbers[0] > numbers[1]:
            raise UserError(f"{KEY}.band={band} must be two increasing numbers from 0 to 1; write [0.1,0.9]")
        for key, value in (("forgetting", forgetting), ("exploration", exploration)):
            if not _is_share(value):
                raise UserError(f"{KEY}.{key}={value} must be a number from 0 to 1")
        self.low, self.high = numbers
        self.forgetting, self.exploration = forgetting, exploration
        self.position = 0
        """Position in the order of `uniform` of the next row to consider."""
        self.results: dict[str, tuple[float, float]] = {}
        """Weighted success and weight of the groups of each row, by its id."""
        self._order = Shuffled(len(rows), seed)

    def choose(self) -> int:
        end = self.position + 2 * len(self.rows)  # so many positions contain a whole pass
        while True:
            index, self.position = self._order.at(self.position), self.position + 1
            if self._is_drawn(index) or self.position > end:
                return index

    def note(self, row: Row, success: float) -> None:
        total, weight = self.results.get(str(row["id"]), (0.0, 0.0))
        kept = 1 - self.forgetting
        self.results[str(row["id"])] = (kept * total + success, kept * weight + 1)

    def state(self) -> dict[str, Any]:
        return {"position": self.position, "results": dict(self.results)}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.position = state.get("position", self.drawn)
        self.results = {row_id: (total, weight) for row_id, (total, weight) in state.get("results", {}).items()}

    def metrics(self) -> dict[str, float]:
        """Return `data/tried_frac`, the share of rows with a result, and `data/too_hard_frac` and
        `data/too_easy_frac`, the shares of these rows below and above the band."""
        means = [total / weight for total, weight in self.results.values()]
        tried = max(1, len(means))
        return {
            "data/tried_frac": len(means) / len(self.rows),
            "data/too_hard_frac": sum(mean < self.low for mean in means) / tried,
            "data/too_easy_frac": sum(mean > self.high for mean in means) / tried,
        }

    def settings(self) -> dict[str, Any]:
        return {"band": [self.low, self.high], "forgetting": self.forgetting}

    def _is_drawn(self, index: int) -> bool:
        """Return whether to draw the row at `position` - 1, which has this index."""
        total, weight = self.results.get(str(self.rows[index]["id"]), (0.0, 0.0))
        if not weight or self.low <= total / weight <= self.high:
            return True
        return random.Random(f"{self.seed}/explore/{self.position}").random() < self.exploration


class StagesSampler(Sampler):
    """`stages`: rows of one stage after another, chosen by the value of a column.

    A stage ends when the mean success of the last `groups` groups of it reaches `success`, or after `max_rows` rows;
    the last stage never ends.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        seed: int,
        *,
        column: str,
        values: Sequence[Sequence[Any]],
        success: float = 0.8,
        groups: int = 64,
        max_rows: int | None = None,
    ):
        """`values` has one list for each stage: the stage contains the rows whose `column` has one of these values.

        Raises:
            UserError: a stage contains no row, or a number is out of range.
        """
        super().__init__(rows, seed)
        if not isinstance(values, Sequence) or not values or not all(isinstance(v, list | tuple) for v in values):
            raise UserError(f"{KEY}.values={values} must have one list for each stage; write [[1],[1,2]]")
        if not _is_share(success):
            raise UserError(f"{KEY}.success={success} must be a number from 0 to 1")
        for key, value in (("groups", groups), ("max_rows", max_rows)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise UserError(f"{KEY}.{key}={value} must be an integer of at least 1")
        if not any(column in row for row in rows):
            known = ", ".join(rows[0]) if rows else "none"
            raise UserError(f"{KEY}.column={column} is no column of the training rows; they have {known}")
        self.column, self.success, self.max_rows = column, success, max_rows
        self.members = [[n for n, row in enumerate(rows) if row.get(column) in chosen] for chosen in values]
        """Indices of the rows of each stage."""
        if [] in self.members:
            empty = self.members.index([])
            raise UserError(f"{KEY}.values: no training row has a {column} of stage {empty + 1}, {list(values[empty])}")
        self._ids = [{str(rows[n]["id"]) for n in members} for members in self.members]
        self._orders = [Shuffled(len(members), f"{seed}/stage{n}") for n, members in enumerate(self.members)]
        self.stage = self.drawn_in_stage = 0
        self.recent: deque[float] = deque(maxlen=groups)
        """Success of the last groups of this stage."""

    def choose(self) -> int:
        if self._is_over() and self.stage < len(self.members) - 1:
            self.stage, self.drawn_in_stage = self.stage + 1, 0
            self.recent.clear()
        place = self._orders[self.stage].at(self.drawn_in_stage)
        self.drawn_in_stage += 1
        return self.members[self.stage][place]

    def note(self, row: Row, success: float) -> None:
        if str(row["id"]) in self._ids[self.stage]:
            self.recent.append(success)

    def state(self) -> dict[str, Any]:
        return {"stage": self.stage, "drawn_in_stage": self.drawn_in_stage, "recent": list(self.recent)}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.stage = min(state.get("stage", 0), len(self.members) - 1)
        self.drawn_in_stage = state.get("drawn_in_stage", 0)
        self.recent.clear()
        self.recent.extend(state.get("recent", ()))

    def metrics(self) -> dict[str, float]:
        """Return `data/stage`, the number of the stage from 1."""
        return {"data/stage": float(self.stage + 1)}

    def _is_over(self) -> bool:
        if self.max_rows is not None and self.drawn_in_stage >= self.max_rows:
            return True
        return len(self.recent) == self.recent.maxlen and sum(self.recent) >= self.success * len(self.recent)


KEY = "data.sampler_config"
SAMPLERS: dict[str, type[Sampler]] = {
    "uniform": RowStream,
    "difficulty": DifficultySampler,
    "stages": StagesSampler,
}


def make_sampler(config: DataConfig, rows: Sequence[Row], seed: int) -> Sampler:
    """Return the sampler of `data.sampler` for the training rows.

    Raises:
        UserError: there is no such sampler, or it does not take `data.sampler_config`.
    """
    name, parameters = config.sampler, dict(config.sampler_config)
    kind = SAMPLERS.get(name)
    if kind is None:
        if "." not in name:
            raise UserError(
                f"data.sampler={name} is not known; choose one of {', '.join(SAMPLERS)}, or name a class of yours: "
                "data.sampler=module.Class"
            )
        kind = load_function(name, "data.sampler")  # type: ignore[assignment]
        if not inspect.isclass(kind) or not issubclass(kind, Sampler) or inspect.isabstract(kind):
            raise UserError(
                f"data.sampler={name} must be a subclass of mtrl.trainer.data.sampler.Sampler with the method choose"
            )
    signature = inspect.signature(kind)
    try:
        signature.bind(rows, seed, **parameters)
    except TypeError as error:
        known = [n for n in signature.parameters if n not in ("rows", "seed")]
        raise UserError(
            f"{KEY}={parameters} does not fit data.sampler={name}, which takes {', '.join(known) or 'no settings'}: "
            f"{error}"
        ) from error
    try:
        sampler = kind(rows, seed, **parameters)
        json.dumps(sampler.state(), allow_nan=False)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"data.sampler={name} cannot be made or gives no state as JSON: {reason(error)}") from error
    return sampler


def _is_share(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1
