"""Comparison of two models on the same rows: their difference, its certainty, and the rows that changed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from mtrl.config.schema import EvaluationConfig
from mtrl.evaluation.results import failed
from mtrl.scoring.agreement import succeeded
from mtrl.scoring.pass_at_k import pass_at_k
from mtrl.scoring.statistics import Difference, Paired, compare, holm, mean_difference
from mtrl.types import Group


@dataclass(frozen=True)
class RowChange:
    """A row on which the success rates of the two models differ; rates are over its samples."""

    row: str
    before: float
    """Success rate of the other model."""
    after: float
    """Success rate of the evaluated model."""


@dataclass(frozen=True)
class PassDifference:
    """pass@k of the evaluated model minus pass@k of the other model, over rows with at least k samples of both."""

    k: int
    difference: Difference
    rows: int


@dataclass(frozen=True)
class ModelComparison:
    """The evaluated model compared with another one, on the rows that have an episode of both that did not fail."""

    model: str
    other: str
    kind: str
    rows: int
    left_out: int
    """Number of rows that have an episode of only one of the models."""
    value: float
    other_value: float
    difference: Difference
    """Success of the evaluated model minus success of the other model."""
    paired: Paired
    """Paired test; wins are rows on which the evaluated model was better."""
    test: str
    p_adjusted: float
    """p-value adjusted by Holm's method over the other models, for the same kind."""
    pass_at_k: list[PassDifference]
    fixed: list[RowChange]
    broken: list[RowChange]


Rows = dict[tuple[str, int], list[float]]
"""Successes (1.0 or 0.0) of the samples of each row, by the row's id and its index among rows with the same id."""


def comparisons(
    model: str,
    groups: Sequence[Group],
    others: Sequence[tuple[str, Sequence[Group]]],
    kind: str,
    config: EvaluationConfig,
) -> list[ModelComparison]:
    """Return one comparison for each other model that has a row in common with the evaluated model.

    Args:
        groups: Groups of the evaluated model, of one kind.
        others: Labels and groups of the other models, of the same kind.
    """
    mine = _rows(groups, config.success_threshold)
    found = [
        _compare(model, mine, label, _rows(theirs, config.success_threshold), kind, config) for label, theirs in others
    ]
    compared = [each for each in found if each is not None]
    adjusted = holm([each.paired.p_value for each in compared])
    return [replace(each, p_adjusted=p) for each, p in zip(compared, adjusted, strict=True)]


def _rows(groups: Sequence[Group], threshold: float) -> Rows:
    met: defaultdict[str, int] = defaultdict(int)
    rows: Rows = {}
    for group in groups:
        row_id = str(group.row.get("id", group.group_id))
        samples = [float(succeeded(t, threshold)) for t in group.trajectories if not failed(t)]
        if samples:
            rows[row_id, met[row_id]] = samples
        met[row_id] += 1
    return rows


def _compare(
    model: str, mine: Rows, other: str, theirs: Rows, kind: str, config: EvaluationConfig
) -> ModelComparison | None:
    both = [key for key in mine if key in theirs]
    if not both:
        return None
    after, before = [fmean(mine[key]) for key in both], [fmean(theirs[key]) for key in both]
    changes = [RowChange(key[0], b, a) for key, b, a in zip(both, before, after, strict=True)]
    single = all(len(rows[key]) == 1 for rows in (mine, theirs) for key in both)
    paired = compare(before, after)
    return ModelComparison(
        model=model,
        other=other,
        kind=kind,
        rows=len(both),
        left_out=len(mine.keys() ^ theirs.keys()),
        value=fmean(after),
        other_value=fmean(before),
        difference=mean_difference([a - b for a, b in zip(after, before, strict=True)], config.confidence),
        paired=paired,
        test="exact McNemar test" if single else "sign test of the rows' rates",
        p_adjusted=paired.p_value,
        pass_at_k=_pass_differences(mine, theirs, both, config) if kind == "sampled" else [],
        fixed=sorted((c for c in changes if c.after > c.before), key=lambda c: c.before - c.after),
        broken=sorted((c for c in changes if c.after < c.before), key=lambda c: c.after - c.before),
    )


def _pass_differences(
    mine: Rows, theirs: Rows, both: Sequence[tuple[str, int]], config: EvaluationConfig
) -> list[PassDifference]:
    found = []
    for k in sorted(set(config.pass_k_values)):
        pairs = [(mine[key], theirs[key]) for key in both if min(len(mine[key]), len(theirs[key])) >= k]
        values = [_pass(a, k) - _pass(b, k) for a, b in pairs]
        if values:
            found.append(PassDifference(k, mean_difference(values, config.confidence), len(values)))
    return found


def _pass(samples: Sequence[float], k: int) -> float:
    return pass_at_k(len(samples), round(sum(samples)), k)
