"""What one check says: a status, the evidence, and what to do about it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum


class Status(StrEnum):
    PASS = "pass"
    WARN = "warn"
    FAIL = "fail"
    SKIP = "skip"


@dataclass(frozen=True)
class Result:
    """One line of the checklist."""

    status: Status
    evidence: str
    """What was looked at and found; for a skipped check the reason."""
    fix: str = ""
    details: list[str] = field(default_factory=list)
    """Every finding, where the evidence names the first ones only. They go to the JSON."""
    name: str = ""
    seconds: float = 0.0

    def named(self, name: str, seconds: float) -> Result:
        return replace(self, name=name, seconds=round(seconds, 3))


def passed(evidence: str) -> Result:
    return Result(Status.PASS, evidence)


def warned(evidence: str, fix: str, details: Iterable[str] = ()) -> Result:
    return Result(Status.WARN, evidence, fix, list(details))


def failed(evidence: str, fix: str, details: Iterable[str] = ()) -> Result:
    return Result(Status.FAIL, evidence, fix, list(details))


def skipped(reason: str) -> Result:
    return Result(Status.SKIP, reason)


def worst(results: Iterable[Result]) -> Status:
    """Fail before warn before pass; what was skipped does not count."""
    statuses = {result.status for result in results}
    return next((status for status in (Status.FAIL, Status.WARN) if status in statuses), Status.PASS)


def to_json(name: str, results: Iterable[Result]) -> str:
    """The whole checklist: `{"name", "status", "checks": [{name, status, evidence, fix, details, seconds}]}`."""
    results = list(results)
    report = {"name": name, "status": worst(results), "checks": [asdict(result) for result in results]}
    return json.dumps(report, indent=2, ensure_ascii=False) + "\n"
