"""The sampler of a mixture: sources by their weights, and the rows of each source by a sampler of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mtrl.config.mixture import in_source, source_configs, source_of, weights_of
from mtrl.config.schema import Config
from mtrl.config.source_weights import Weight, shares_of
from mtrl.errors import UserError
from mtrl.rollout.pauses import Pauses
from mtrl.scoring.sources import named
from mtrl.trainer.data.sampler import Sampler, make_sampler
from mtrl.types import Row

LEAST_GROUPS = 4
"""Least number of last groups of a source by which it is paused."""


def sampler_of(config: Config, rows: Sequence[Row]) -> Sampler:
    """Return the sampler of the training rows of a run, or of a mixture.

    Raises:
        UserError: see `make_sampler`; or a source with a weight has no training rows.
    """
    if not config.environments or not rows:
        return make_sampler(config.data, rows, config.seed)
    weights, samplers = weights_of(config), {}
    for name, own in source_configs(config).items():
        mine = [row for row in rows if source_of(str(row["id"])) == name]
        if weights[name].is_ever_positive and not mine:
            raise UserError(
                f"environments.{name} has no training rows and a weight above 0; check its data.path and "
                f"data.train_split, or set environments.{name}.weight=0 to evaluate it only"
            )
        if mine:
            with in_source(name):
                samplers[name] = make_sampler(own.data, mine, config.seed)
    return MixedSampler(rows, config.seed, weights, samplers, pauses_of(config, weights))


def pauses_of(config: Config, weights: Mapping[str, Weight]) -> Pauses:
    """Return the pauses of the sources with a weight. Each is judged by as many groups as its largest share of a step
    has, and by at least `LEAST_GROUPS`."""
    points = {rows for weight in weights.values() for rows, _ in weight.points}
    shares = [shares_of(weights, rows) for rows in points]  # between two points a share has no maximum
    windows = {
        name: max(LEAST_GROUPS, round(max(each[name] for each in shares) * config.trainer.prompts_per_step))
        for name, weight in weights.items()
        if weight.is_ever_positive
    }
    return Pauses(windows, config.environment.max_failed_share)


class MixedSampler(Sampler):
    """Draws every row from the source that is furthest behind its share.

    Source s has the share p_s(n) = weight_s / sum of the weights of draw n, and is owed o_s = the sum of its shares so
    far - the number of its draws. Every draw goes to the source that is owed most, and to the first of several such
    sources. With k sources, -1 < o_s <= k - 1 after every draw: before it the k numbers o_s sum to 1, so the largest is
    positive, and afterwards they sum to 0. Only sources that are not paused count. All o_s become 0 when a source is
    paused or drawn again, so that no source makes up for its pause, and when a resumed run has other weights.
    """

    pauses: Pauses

    def __init__(
        self,
        rows: Sequence[Row],
        seed: int,
        weights: Mapping[str, Weight],
        samplers: Mapping[str, Sampler],
        pauses: Pauses,
    ):
        """`weights` has every source; `samplers` has those with training rows, and `pauses` those with a weight."""
        super().__init__(rows, seed)
        self.weights, self.samplers, self.pauses = dict(weights), samplers, pauses
        self.owed = dict.fromkeys(pauses.active, 0.0)
        """Number of draws that each source that is not paused is behind its share; negative: ahead of it."""
        places: dict[str, list[int]] = {}
        for place, row in enumerate(rows):
            places.setdefault(source_of(str(row["id"])), []).append(place)
        self.places = places
        """Indices in `rows` of the rows of each source."""

    def choose(self) -> int:
        active = self.pauses.active
        if self.owed.keys() != {*active}:
            self.owed = dict.fromkeys(active, 0.0)
        for name, share in shares_of({name: self.weights[name] for name in active}, self.drawn).items():
            self.owed[name] += share
        name = max(active, key=lambda name: round(self.owed[name], 9))  # else rounding errors decide between equals
        self.owed[name] -= 1
        return self.places[name][self.samplers[name].next_index()]

    def note(self, row: Row, success: float) -> None:
        self.samplers[source_of(str(row["id"]))].note(row, success)

    def state(self) -> dict[str, Any]:
        own = {
            name: {"kind": type(sampler).__name__, "drawn": sampler.drawn, "state": sampler.state()}
            for name, sampler in self.samplers.items()
        }
        return {"weights": self._points(), "owed": dict(self.owed), "sources": own, "pauses": self.pauses.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        for name, stored in state.get("sources", {}).items():
            if (sampler := self.samplers.get(name)) is not None:
                sampler.drawn = stored["drawn"]
                sampler.restore(stored["state"] if stored["kind"] == type(sampler).__name__ else {})
        self.pauses.restore(state.get("pauses", {}))
        if state.get("weights") == self._points() and "owed" in state:  # earlier versions stored numbers of draws
            self.owed = dict(state["owed"])

    def described(self) -> dict[str, dict[str, Any]]:
        return {name: sampler.described()[""] for name, sampler in self.samplers.items()}

    def metrics(self) -> dict[str, float]:
        """Return `data/NAME/epoch`, the number of passes over the training rows of each source, the metrics of its
        sampler as `data/NAME/…`, `data/NAME/share`, the share of the source in the next row if all sources are drawn,
        and `data/NAME/paused` (`Pauses.metrics`)."""
        found = self.pauses.metrics()
        for name, share in shares_of(self.weights, self.drawn).items():
            found[f"data/{name}/share"] = share
        for name, sampler in self.samplers.items():
            found |= named({"data/epoch": sampler.drawn / len(sampler.rows), **sampler.metrics()}, name)
        return found

    def _points(self) -> dict[str, list[list[float]]]:
        """Return the points of all weights, as values that can be written as JSON."""
        return {name: [list(point) for point in weight.points] for name, weight in self.weights.items()}
