"""A diagnosis on the screen: the first finding in full, the others in one line each."""

from __future__ import annotations

import sys
from typing import TextIO

from rich.console import Console
from rich.padding import Padding
from rich.rule import Rule
from rich.text import Text

from mtrl.diagnose.diagnosis import DiagnosisReport
from mtrl.diagnose.finding import Finding, Severity
from mtrl.diagnose.lineage import Link
from mtrl.diagnose.stats import sparkline
from mtrl.utils.text import one_line, short

STYLES = {Severity.ALARM: "bold red", Severity.WARNING: "bold yellow", Severity.NOTE: "bold cyan"}
CURVES = 3
"""Maximum number of metrics whose curves are shown for a finding."""


def show(report: DiagnosisReport, file: TextIO | None = None, width: int | None = None) -> None:
    """Print the report. All text from a run is cleaned, because a response must not act on the terminal."""
    screen = Console(file=file or sys.stdout, width=width, highlight=False, markup=False, emoji=False)
    record, diagnosis = report.record, report.diagnosis
    checked = len(diagnosis.checked)
    head = f"{one_line(record.path)}: {record.steps} steps, {checked} symptom{'' if checked == 1 else 's'} checked"
    screen.print(Rule(Text(head, style="bold"), align="left", style="cyan"))
    for link in report.links:
        _line(screen, "", _sentence(link))
    for remark in [*report.remarks, *(f"a rule failed: {each}" for each in diagnosis.broken)]:
        _line(screen, "remark", remark, "yellow")
    first = report.first
    if first is None:
        _healthy(screen, report)
    elif first.severity == Severity.NOTE:
        looked = f"none of {checked} symptoms is an alarm or a warning; notes:"
        _line(screen, "healthy", looked, "bold green")
        _others(screen, diagnosis.findings)
    else:
        _full(screen, report, first)
        _others(screen, diagnosis.findings[1:])
    if diagnosis.early:
        names = ", ".join(diagnosis.early)
        _line(screen, "too early to tell", f"{names} (a decision needs a window of {record.window} steps)", "dim")


def _healthy(screen: Console, report: DiagnosisReport) -> None:
    if report.status == "healthy":
        _line(screen, "healthy", f"none of: {', '.join(report.diagnosis.checked)}", "bold green")
    else:
        _line(screen, "no symptom yet", f"checked: {', '.join(report.diagnosis.checked) or 'nothing'}")


def _full(screen: Console, report: DiagnosisReport, finding: Finding) -> None:
    screen.print()
    screen.print(
        Text.assemble(
            (f"{finding.severity.upper()} ", STYLES[finding.severity]),
            (one_line(finding.title, 400), "bold"),
            (f"  {finding.rule} {', '.join(finding.requirements)}", "dim"),
        )
    )
    for sentence in finding.evidence:
        _item(screen, one_line(sentence, 600))
    for key in finding.metrics[:CURVES]:
        series = report.record.series(key)
        if len(series) > 1:
            ends = f"{short(float(series.values[0]))} … {short(float(series.values[-1]))}"
            _item(screen, Text.assemble(f"{one_line(key)}  ", (sparkline(series.values.tolist()), "cyan"), f"  {ends}"))
    for witness in finding.witnesses:
        _item(screen, Text.assemble((one_line(witness.where), "bold"), f"  {one_line(witness.summary, 400)}"))
    if finding.advice:
        _line(screen, "advice", finding.advice)
    if finding.change is not None:
        now = f"(now {', '.join(finding.change.current)}) " if finding.change.current else ""
        _line(screen, "change", f"{finding.change}  {now}– {finding.change.why}", "bold green")
    if finding.expect:
        _line(screen, "expect", finding.expect)
    for proposal in finding.proposals[1:]:
        _line(screen, "else", f"{proposal} – {proposal.why}", "dim")
    commands = [*([report.command] if report.command else []), *finding.look]
    for command in commands:  # never wrapped, so that they can be copied
        screen.print(Text(f"  {one_line(command, 4000)}", style="bold cyan"), soft_wrap=True)


def _others(screen: Console, findings: list[Finding]) -> None:
    if findings:
        screen.print()
    for finding in findings:
        change = f"  → {finding.change}" if finding.change else ""
        screen.print(
            Text.assemble(
                (f"{finding.severity.value} ", STYLES[finding.severity]),
                one_line(finding.title, 300),
                (one_line(change), "green"),
                (f"  {finding.rule}", "dim"),
            )
        )


def _sentence(link: Link) -> str:
    """Describe a link in one sentence."""
    changed = ", ".join(map(str, link.settings)) or "nothing"
    effects = [
        f"{e.name} {short(e.change.before)} → {short(e.change.after)} (± {short(2 * e.change.error)}): {e.verdict}"
        for e in link.effects
    ]
    return f"{link.child} changed {changed} of {link.parent}: {'; '.join(effects) or link.verdict}"


def _line(screen: Console, name: str, text: str, style: str = "") -> None:
    label = Text(f"{name}: ", style=style or "bold") if name else Text()
    screen.print(Text.assemble(label, one_line(text, 2000)))


def _item(screen: Console, text: str | Text) -> None:
    screen.print(Padding(Text.assemble("- ", text), (0, 0, 0, 2)))
