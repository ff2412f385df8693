"""The sampler of a mixture: sources by their weights, and the rows of each source by a sampler of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mtrl.config.mixture import in_source, source_configs, source_of, weights_of
from mtrl.config.schema import Config
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
        if weights[name] and not mine:
            raise UserError(
                f"environments.{name} has no training rows and weight={weights[name]:g}; check its data.path and "
                f"data.train_split, or set environments.{name}.weight=0 to evaluate it only"
            )
        if mine:
            with in_source(name):
                samplers[name] = make_sampler(own.data, mine, config.seed)
    return MixedSampler(rows, config.seed, weights, samplers, pauses_of(config, weights))


def pauses_of(config: Config, weights: Mapping[str, float]) -> Pauses:
    """Return the pauses of the sources with a weight. Each is judged by as many groups as its share of a step has, and
    by at least `LEAST_GROUPS`."""
    shares = {name: weight / sum(weights.values()) for name, weight in weights.items() if weight}
    windows = {
        name: max(LEAST_GROUPS, round(share * config.trainer.prompts_per_step)) for name, share in shares.items()
    }
    return Pauses(windows, config.environment.max_failed_share)


class MixedSampler(Sampler):
    """Draws every row from the source that is furthest behind its share.

    With shares p_s = weight_s / sum of the weights, draw n (from 1) goes to the source with the largest p_s n - d_s,
    where d_s is its number of draws so far, and to the first of several such sources. With k sources, always
    p_s n - (k - 1) <= d_s < p_s n + 1: the largest of k numbers that sum to 1 is positive, and all p_s n - d_s sum to
    0. Only sources that are not paused count. The counts d_s begin again when a source is paused or drawn again, so
    that no source makes up for its pause, and when a resumed run has other weights.
    """

    pauses: Pauses

    def __init__(
        self,
        rows: Sequence[Row],
        seed: int,
        weights: Mapping[str, float],
        samplers: Mapping[str, Sampler],
        pauses: Pauses,
    ):
        """`weights` has every source; `samplers` has those with training rows, and `pauses` those with a weight."""
        super().__init__(rows, seed)
        self.weights, self.samplers, self.pauses = dict(weights), samplers, pauses
        self.counts = dict.fromkeys(pauses.active, 0)
        """Number of draws from each source that is not paused, since these sources and their weights are what they
        are."""
        places: dict[str, list[int]] = {}
        for place, row in enumerate(rows):
            places.setdefault(source_of(str(row["id"])), []).append(place)
        self.places = places
        """Indices in `rows` of the rows of each source."""

    def choose(self) -> int:
        active = self.pauses.active
        if self.counts.keys() != {*active}:
            self.counts = dict.fromkeys(active, 0)
        total, number = sum(self.weights[name] for name in active), sum(self.counts.values()) + 1
        name = max(active, key=lambda name: self.weights[name] / total * number - self.counts[name])
        self.counts[name] += 1
        return self.places[name][self.samplers[name].next_index()]

    def note(self, row: Row, success: float) -> None:
        self.samplers[source_of(str(row["id"]))].note(row, success)

    def state(self) -> dict[str, Any]:
        own = {
            name: {"kind": type(sampler).__name__, "drawn": sampler.drawn, "state": sampler.state()}
            for name, sampler in self.samplers.items()
        }
        paused = self.pauses.state()
        return {"weights": dict(self.weights), "counts": dict(self.counts), "sources": own, "pauses": paused}

    def restore(self, state: Mapping[str, Any]) -> None:
        for name, stored in state.get("sources", {}).items():
            if (sampler := self.samplers.get(name)) is not None:
                sampler.drawn = stored["drawn"]
                sampler.restore(stored["state"] if stored["kind"] == type(sampler).__name__ else {})
        self.pauses.restore(state.get("pauses", {}))
        if state.get("weights") == self.weights:
            self.counts = dict(state["counts"])

    def described(self) -> dict[str, dict[str, Any]]:
        return {name: sampler.described()[""] for name, sampler in self.samplers.items()}

    def metrics(self) -> dict[str, float]:
        """Return `data/NAME/epoch`, the number of passes over the training rows of each source, the metrics of its
        sampler as `data/NAME/…`, and `data/NAME/paused` (`Pauses.metrics`)."""
        found = self.pauses.metrics()
        for name, sampler in self.samplers.items():
            found |= named({"data/epoch": sampler.drawn / len(sampler.rows), **sampler.metrics()}, name)
        return found
