"""The order in which training rows are drawn: a shuffle per pass that depends only on the seed and a count."""

from __future__ import annotations

import random
from collections.abc import Sequence

from mtrl.types import Row


class RowStream:
    """An endless stream of rows. Its whole state is `drawn`, which a resumed run sets."""

    def __init__(self, rows: Sequence[Row], seed: int):
        self.rows, self.seed = rows, seed
        self.drawn = 0
        self._order: tuple[int, list[int]] = (-1, [])

    def next(self) -> Row:
        """Return the next row; every pass over the data has another order."""
        epoch, index = divmod(self.drawn, len(self.rows))
        if self._order[0] != epoch:
            order = list(range(len(self.rows)))
            random.Random(f"{self.seed}/{epoch}").shuffle(order)
            self._order = (epoch, order)
        self.drawn += 1
        return self.rows[self._order[1][index]]
