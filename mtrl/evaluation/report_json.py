"""report.json: all values of a report, in a form that is stable within a version."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

from mtrl.evaluation.report import ModelReport, ModelsReport
from mtrl.utils.files import to_strict_json

VERSION = 1
"""Version of the format. It increases when a key changes its meaning or is removed; new keys may be added within a
version."""
INTERNAL = frozenset({"seen", "episode"})
"""Names of fields that hold whole episodes, which are stored in other files."""


def to_json(report: ModelsReport) -> str:
    """Return the report as strict JSON with a final newline."""
    return to_strict_json(to_dict(report), indent=2) + "\n"


def to_dict(report: ModelsReport) -> dict[str, Any]:
    """Return `{"format": "mtrl.evaluation", "version": 1, …}`. A rate is `{value, low, high, effective_samples}` with
    the first three in [0, 1]."""
    return {
        "format": "mtrl.evaluation",
        "version": VERSION,
        "name": report.name,
        "created": report.created,
        "method": report.method,
        "models": [_model(model) for model in report.models],
        "comparisons": _plain(report.comparisons),
        "remarks": _plain(report.remarks),
        "generalisation": report.generalisation,
        "independence": report.independence,
        "disagreements": _plain(report.disagreements),
        "judges": report.judges,
    }


def _model(model: ModelReport) -> dict[str, Any]:
    return {
        "label": model.label,
        "source": model.source,
        "usage": model.usage,
        "greedy": _plain(model.results.get("greedy")),
        "sampled": _plain(model.results.get("sampled")),
        "failed_kinds": model.lost,
        "by_source": _plain(model.by_source),
    }


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value) if f.name not in INTERNAL}
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value.value if isinstance(value, Enum) else value
