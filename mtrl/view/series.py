"""Rows of metrics as curves: columns by key, thinned if a curve has more points than a screen can show."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import Any

from mtrl.record.records import Record, finite

MOST_POINTS = 2000

Points = list[tuple[int, float | None]]


def curves(rows: Sequence[Record], patterns: Sequence[str], since: int | None, most: int) -> dict[str, Any]:
    """Return the answer of `/metrics`.

    Args:
        patterns: Keys, or prefixes of keys followed by `*`; empty: all keys.
        since: Use only rows of later steps.
        most: Maximum number of points per curve.
    """
    keys = sorted({key for row in rows for key in row if key != "step"})
    chosen = [key for key in keys if not patterns or matches(key, patterns)]
    later = [row for row in rows if since is None or row["step"] > since]
    found = {key: points_of(later, key) for key in chosen}
    return {
        "last_step": max((row["step"] for row in rows), default=None),
        "rows": len(rows),
        "keys": keys,
        "columns": {key: column(thin(points, most)) for key, points in found.items() if points},
        "thinned": [key for key, points in found.items() if len(points) > most],
    }


def matches(key: str, patterns: Iterable[str]) -> bool:
    return any(key.startswith(p[:-1]) if p.endswith("*") else key == p for p in patterns)


def points_of(rows: Iterable[Record], key: str) -> Points:
    """Return (step, value) of the rows that have the key, sorted by step. A value that is not finite is None; text is
    left out."""
    values = ((row["step"], row[key]) for row in rows if key in row)
    points = [(step, finite(value)) for step, value in values if value is None or isinstance(value, int | float)]
    return sorted(points, key=itemgetter(0))  # rows of an evaluation are in the order of its models, not by step


def thin(points: Points, most: int) -> Points:
    """Reduce a curve to at most `most` points: the lowest and the highest of each of equal stretches, so that spikes
    stay.

    A stretch without a number has one point without a value.
    """
    if len(points) <= most:
        return points
    stretches = max(1, most // 2)
    thinned: Points = []
    for number in range(stretches):
        stretch = points[number * len(points) // stretches : (number + 1) * len(points) // stretches]
        numbers = [(value, place) for place, (_, value) in enumerate(stretch) if value is not None]
        places = {min(numbers)[1], max(numbers)[1]} if numbers else {0}
        thinned += [stretch[place] for place in sorted(places)]
    return thinned[:most]


def column(points: Points) -> dict[str, Any]:
    return {"steps": [step for step, _ in points], "values": [value for _, value in points]}
