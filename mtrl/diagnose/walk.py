"""The walk: every rule in its order, and what each of them says."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from mtrl.diagnose import rules  # noqa: F401  (registers them)
from mtrl.diagnose.finding import Finding, Severity
from mtrl.diagnose.record import Record
from mtrl.diagnose.registry import RULES, Rule

LOG = logging.getLogger("mtrl.diagnose")


@dataclass
class Diagnosis:
    """What the rules said of a run."""

    findings: list[Finding] = field(default_factory=list)
    """In the order in which they should be worked on: alarms, warnings, notes, each in the order of the rules."""
    checked: list[str] = field(default_factory=list)
    """Rules that were asked."""
    early: list[str] = field(default_factory=list)
    """Rules for which there are not enough steps yet."""
    broken: list[str] = field(default_factory=list)
    """Rules that failed on this run: a defect of theirs, told in words."""

    def worst(self) -> Severity | None:
        return self.findings[0].severity if self.findings else None


def walk(record: Record, settle: Callable[[Finding], Finding] = lambda finding: finding) -> Diagnosis:
    """Ask every rule that has enough steps. A rule that fails is told, and costs only itself."""
    diagnosis = Diagnosis()
    for rule in RULES:
        if not rule.is_due(record):
            diagnosis.early.append(rule.name)
            continue
        try:
            finding = _ask(rule, record, settle)
        except Exception as error:
            LOG.debug("rule %s failed", rule.name, exc_info=True)
            diagnosis.broken.append(f"{rule.name}: {type(error).__name__}: {error}")
            continue
        diagnosis.checked.append(rule.name)
        if finding is not None:
            diagnosis.findings.append(finding)
    diagnosis.findings.sort(key=lambda finding: finding.severity.rank)  # stable: the order of the rules within
    return diagnosis


def _ask(rule: Rule, record: Record, settle: Callable[[Finding], Finding]) -> Finding | None:
    finding = rule.check(record)
    if finding is None:
        return None
    steps = finding.steps if finding.steps != (0, 0) else (min(1, record.step), record.step)
    return settle(replace(finding, rule=rule.name, requirements=rule.requirements, steps=steps))
