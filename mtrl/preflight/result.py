"""The result of one check: a status, the evidence, and the fix."""

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
class CheckResult:
    """The result of one check, which is one line of the checklist."""

    status: Status
    evidence: str
    """The finding and the data that it is based on; for a skipped check, the reason."""
    fix: str = ""
    details: list[str] = field(default_factory=list)
    """All findings, for the JSON; the evidence names only the first ones."""
    name: str = ""
    seconds: float = 0.0

    def named(self, name: str, seconds: float) -> CheckResult:
        return replace(self, name=name, seconds=round(seconds, 3))


def passed(evidence: str) -> CheckResult:
    return CheckResult(Status.PASS, evidence)


def warned(evidence: str, fix: str, details: Iterable[str] = ()) -> CheckResult:
    return CheckResult(Status.WARN, evidence, fix, list(details))


def failed(evidence: str, fix: str, details: Iterable[str] = ()) -> CheckResult:
    return CheckResult(Status.FAIL, evidence, fix, list(details))


def skipped(reason: str) -> CheckResult:
    return CheckResult(Status.SKIP, reason)


def worst(results: Iterable[CheckResult]) -> Status:
    """Return the worst status: fail before warn before pass. Skipped checks do not count."""
    statuses = {result.status for result in results}
    return next((status for status in (Status.FAIL, Status.WARN) if status in statuses), Status.PASS)


def to_json(name: str, results: Iterable[CheckResult]) -> str:
    """Return the whole checklist as JSON: `{"name", "status", "checks": [{name, status, evidence, fix, details,
    seconds}]}`."""
    results = list(results)
    report = {"name": name, "status": worst(results), "checks": [asdict(result) for result in results]}
    return json.dumps(report, indent=2, ensure_ascii=False) + "\n"
