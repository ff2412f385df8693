"""The walk: checks every rule in order, and collects the findings."""

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
    """Results of all rules for a run."""

    findings: list[Finding] = field(default_factory=list)
    """Findings in the order in which to work on them: alarms, warnings, notes, each in the order of the rules."""
    checked: list[str] = field(default_factory=list)
    """Names of the rules that were checked."""
    early: list[str] = field(default_factory=list)
    """Names of the rules for which there are not enough steps yet."""
    broken: list[str] = field(default_factory=list)
    """Rules that raised an exception on this run, each with its error; this is a defect of the rule."""

    def worst(self) -> Severity | None:
        return self.findings[0].severity if self.findings else None


def walk(record: Record, settle: Callable[[Finding], Finding] = lambda finding: finding) -> Diagnosis:
    """Check every rule that has enough steps. A rule that raises is recorded in `broken`, and the walk continues."""
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
    diagnosis.findings.sort(key=lambda finding: finding.severity.rank)  # a stable sort: the order of the rules stays
    return diagnosis


def _ask(rule: Rule, record: Record, settle: Callable[[Finding], Finding]) -> Finding | None:
    finding = rule.check(record)
    if finding is None:
        return None
    steps = finding.steps if finding.steps != (0, 0) else (min(1, record.step), record.step)
    return settle(replace(finding, rule=rule.name, requirements=rule.requirements, steps=steps))
