"""Comparison of several runs: the keys of their configurations that differ, and the runs that differ only in the
seed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mtrl.record.config import Flat

PLACES = ("run_dir", "resume")
"""Keys that never count as a difference between runs."""
MOST_DIFFERENCES = 4
"""Maximum number of differences in the label of a family."""


def differing(configs: Sequence[Flat]) -> list[str]:
    """Return the sorted keys that have several values. A missing key is not a difference, because older versions had
    fewer keys. The location of a run never counts."""
    keys = sorted({key for config in configs for key in config} - set(PLACES))
    return [key for key in keys if len({repr(config[key]) for config in configs if key in config}) > 1]


def of_run(config: Flat, keys: Sequence[str]) -> Flat:
    return {key: config.get(key) for key in keys}


def families(runs: Sequence[tuple[str, Flat]], keys: Sequence[str]) -> list[str]:
    """Return a label for each run (name, configuration). Runs that differ only in the seed share a label."""
    labels: dict[str, str] = {}
    found = []
    for name, config in runs:
        differences = [key for key in keys if key not in ("seed", "name") and key in config]
        signature = repr((name, [(key, config[key]) for key in differences]))
        if signature not in labels:
            label = _label(name, config, differences)
            taken = sum(known == label or known.startswith(f"{label} (") for known in labels.values())
            labels[signature] = f"{label} ({taken + 1})" if taken else label
        found.append(labels[signature])
    return found


def _label(name: str, config: Flat, keys: Sequence[str]) -> str:
    shown = [f"{key.rpartition('.')[2]}={_short(config[key])}" for key in keys[:MOST_DIFFERENCES]]
    more = [f"+{len(keys) - MOST_DIFFERENCES}"] if len(keys) > MOST_DIFFERENCES else []
    return " · ".join([name, *shown, *more])


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:39]}…"
