"""The outcome of one case: its line of the checklist, and its figures. This module does not import torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from mtrl.preflight.result import CheckResult, Status, failed, passed

FIX = "read the end of its output in the JSON file, under details"


@dataclass(frozen=True)
class CaseResult:
    """The result of one case."""

    result: CheckResult
    figures: dict[str, Any] = field(default_factory=dict)
    """Measured numbers by name; a name ends with its unit."""

    @property
    def passed(self) -> bool:
        return self.result.status == Status.PASS

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> CaseResult:
        fields = json.loads(text)
        result = fields["result"]
        return cls(CheckResult(**{**result, "status": Status(result["status"])}), fields["figures"])


def judged(problem: str, evidence: str, figures: Mapping[str, Any]) -> CaseResult:
    """Return a passed outcome if `problem` is empty, else a failed one that names the problem before the evidence."""
    result = failed(f"{problem}; {evidence}", FIX) if problem else passed(evidence)
    return CaseResult(result, dict(figures))
