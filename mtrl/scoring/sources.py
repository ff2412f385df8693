"""The metrics of each source of a mixture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mtrl.config.mixture import source_of
from mtrl.config.schema import EvaluationConfig
from mtrl.environments.family import Family
from mtrl.scoring.measures import val_metrics
from mtrl.types import Group


def of_source(groups: Sequence[Group], name: str) -> list[Group]:
    """Return the groups of one source, in their order."""
    return [group for group in groups if source_of(str(group.row["id"])) == name]


def named(metrics: Mapping[str, float], name: str) -> dict[str, float]:
    """Return the metrics of one source of a mixture, or of one role of self-play, under their names: `val/success/mean`
    becomes `val/NAME/success/mean`."""
    return {key.replace("/", f"/{name}/", 1): value for key, value in metrics.items()}


def val_metrics_of_sources(
    groups: Mapping[str, list[Group]], sources: Sequence[str], config: EvaluationConfig, family: Family
) -> dict[str, float]:
    """Return the metrics of `val_metrics` for each source that has greedy episodes, as `val/NAME/…`; empty without
    sources. Arguments and errors are those of `val_metrics`."""
    found: dict[str, float] = {}
    for name in sources:
        own = {kind: of_source(some, name) for kind, some in groups.items()}
        if own["greedy"]:
            found |= named(val_metrics(own, config, family), name)
    return found
