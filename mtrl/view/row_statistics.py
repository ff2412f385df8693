"""Statistics of the training rows of a run, by source: the answer of `/rows`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mtrl.config.mixture import source_of
from mtrl.record.records import Record

BINS = 10
"""Number of equal intervals of the running success, 0 to 1."""
MOST_STEPS = 12
"""Maximum number of steps at which the distribution is shown."""
MOST_ROWS = 10
"""Maximum length of the lists of the hardest and of the easiest rows."""
FORGETTING = 0.5
"""Forgetting for a sampler that has none of its own; it is the default of `data.sampler=difficulty`."""

Json = dict[str, Any]


@dataclass
class RowResult:
    """The results of one row so far."""

    id: str
    total: float = 0.0
    """Weighted sum of the success of its groups."""
    weight: float = 0.0
    groups: int = 0
    step: int = 0
    """Step of its last group."""

    @property
    def success(self) -> float:
        """Running success, as in `DifficultySampler`."""
        return self.total / self.weight

    def add(self, success: float, forgetting: float, step: int) -> None:
        self.total = (1 - forgetting) * self.total + success
        self.weight = (1 - forgetting) * self.weight + 1
        self.groups, self.step = self.groups + 1, step

    def to_json(self) -> Json:
        return {"id": self.id, "success": self.success, "groups": self.groups, "step": self.step}


def row_statistics(records: Sequence[Record]) -> list[Json]:
    """Return the statistics of each source, in the format of `/rows` (`mtrl/view/http_api.py`)."""
    settings: Mapping[str, Any] = {}
    for record in records:
        settings = record.get("sources", settings)
    rows: dict[str, dict[str, RowResult]] = {name: {} for name in settings}
    over_time: dict[str, list[Json]] = {name: [] for name in settings}
    steps = [record for record in records if "results" in record]
    last_of_step = {int(record["step"]): record for record in steps}  # with overlap a step may have several lines
    shown = {id(record) for record in evenly(list(last_of_step.values()))}
    for record in steps:
        for row_id, success in record["results"]:
            name = "" if "" in settings else source_of(row_id)
            if name in rows:
                result = rows[name].setdefault(row_id, RowResult(row_id))
                result.add(success, settings[name].get("forgetting", FORGETTING), int(record["step"]))
        if id(record) in shown:
            for name in settings:
                over_time[name].append({"step": int(record["step"]), **distribution(rows[name], settings[name])})
    return [
        {
            "name": name,
            "sampler": own["sampler"],
            "rows": own["rows"],
            "band": own.get("band"),
            **distribution(rows[name], own),
            "over_time": over_time[name],
            **extremes(list(rows[name].values())),
        }
        for name, own in settings.items()
    ]


def distribution(rows: Mapping[str, RowResult], settings: Mapping[str, Any]) -> Json:
    """Return how many rows have a result, how many of them lie in each interval of the running success, and how many
    lie in the band of the sampler and outside of it; these are null without a band."""
    means = [row.success for row in rows.values()]
    bins = [0] * BINS
    for mean in means:
        bins[min(BINS - 1, int(mean * BINS))] += 1
    found: Json = {"tried": len(means), "bins": bins, **dict.fromkeys(("below", "inside", "above"))}
    if (band := settings.get("band")) is not None:
        low, high = band
        found["below"], found["above"] = sum(mean < low for mean in means), sum(mean > high for mean in means)
        found["inside"] = len(means) - found["below"] - found["above"]
    return found


def extremes(rows: Sequence[RowResult]) -> Json:
    """Return the rows of the lowest and of the highest running success; of equal rows, those with more groups."""
    hardest = sorted(rows, key=lambda row: (row.success, -row.groups, row.id))[:MOST_ROWS]
    easiest = sorted(rows, key=lambda row: (-row.success, -row.groups, row.id))[:MOST_ROWS]
    return {"hardest": [row.to_json() for row in hardest], "easiest": [row.to_json() for row in easiest]}


def evenly(records: Sequence[Record]) -> list[Record]:
    """Return at most `MOST_STEPS` records at equal distances, with the last one."""
    count = min(MOST_STEPS, len(records))
    return [records[(number + 1) * len(records) // count - 1] for number in range(count)]
