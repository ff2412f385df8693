"""A diagnosis with all data for its display: the record, the lineage, the command of the first change."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mtrl.diagnose.command import command
from mtrl.diagnose.finding import Finding, Severity
from mtrl.diagnose.lineage import Link, lineage, tried_in_vain
from mtrl.diagnose.proposals import Proposals
from mtrl.diagnose.record import Record
from mtrl.diagnose.walk import Diagnosis, walk
from mtrl.errors import UserError


@dataclass
class DiagnosisReport:
    """Report of `mtrl diagnose`."""

    record: Record
    diagnosis: Diagnosis
    links: list[Link] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    """Remarks on the lineage: unreadable ancestors, and several changes at once."""
    command: str | None = None
    """Command that repeats the run with the first change of the first finding."""

    @property
    def first(self) -> Finding | None:
        """The finding to work on: the most severe one; among equals, the first in the order of the rules."""
        return self.diagnosis.findings[0] if self.diagnosis.findings else None

    @property
    def status(self) -> str:
        """alarm | warning | note | healthy | too early to tell"""
        worst = self.diagnosis.worst()
        if worst is not None:
            return worst.value
        return "healthy" if len(self.diagnosis.checked) > len(self.diagnosis.early) else "too early to tell"

    def to_dict(self) -> dict[str, Any]:
        """Return the report as a dict for JSON."""
        return {
            "run": str(self.record.path),
            "status": self.status,
            "steps": self.record.steps,
            "window": self.record.window,
            "findings": [finding.to_dict() for finding in self.diagnosis.findings],
            "command": self.command,
            "checked": self.diagnosis.checked,
            "too_early": self.diagnosis.early,
            "broken": self.diagnosis.broken,
            "lineage": [link.to_dict() for link in self.links],
            "remarks": self.remarks,
        }


def diagnose(path: Path) -> DiagnosisReport:
    """Diagnose the run in a folder.

    Raises:
        UserError: The run does not exist or cannot be read.
    """
    record = Record.load(path)
    remarks: list[str] = []
    try:
        links = lineage(record)
    except UserError as error:
        links = []
        remarks.append(str(error))
    diagnosis = walk(record, Proposals(record.config, tried_in_vain(links)).settle)
    if links and links[-1].decisions > 1:
        changed = ", ".join(map(str, links[-1].settings))
        remarks.append(
            f"this run changed {links[-1].decisions} settings of its parent at once ({changed}): "
            "their effects cannot be separated; change one at a time"
        )
    report = DiagnosisReport(record, diagnosis, links, remarks)
    report.command = _command(report)
    return report


def _command(report: DiagnosisReport) -> str | None:
    """Return the command of the first finding; None if it proposes no change or is only a note."""
    first = report.first
    if first is None or first.change is None or first.severity == Severity.NOTE:
        return None
    return command(report.record.config, first.change.words, report.record.path)
