"""A diagnosis as one self-contained page of HTML, which loads nothing and runs no script."""

from __future__ import annotations

from mtrl.diagnose.diagnosis import DiagnosisReport
from mtrl.diagnose.finding import Finding
from mtrl.diagnose.record import Record
from mtrl.utils.text import html_text, short

CURVES = 4
"""Maximum number of metrics that are drawn for a finding."""

STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #777; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.3rem; } h2 { font-size: 1.1rem; margin: 0 0 .5rem; }
section { border: 1px solid var(--line); border-left-width: 6px; border-radius: 6px; padding: 1rem; margin: 1rem 0; }
.alarm { border-left-color: #CC3311; } .warning { border-left-color: #D55E00; } .note { border-left-color: #0072B2; }
.healthy { border-left-color: #009E73; } .soft { color: var(--soft); font-size: .9em; }
code, pre { font: 13px/1.45 ui-monospace, monospace; } pre { overflow-x: auto; white-space: pre-wrap; }
svg { width: 100%; height: auto; background: #fff; border-radius: 4px; }
dt { font-weight: 600; } dd { margin: 0 0 .5rem 1rem; }
"""


def page(report: DiagnosisReport) -> str:
    """Return the whole document. Text of a run is escaped. The page has no script, and its policy forbids scripts."""
    name = html_text(str(report.record.path))
    findings = "".join(_section(report, finding) for finding in report.diagnosis.findings)
    if not findings:
        text = f"None of: {', '.join(report.diagnosis.checked) or 'nothing'}."
        findings = f'<section class="healthy"><h2>{html_text(report.status)}</h2><p>{html_text(text)}</p></section>'
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        "<!doctype html>\n"
        f'<html lang="en"><head><meta charset="utf-8"><title>Diagnosis of {name}</title>'
        f'<meta name="viewport" content="width=device-width"><meta http-equiv="Content-Security-Policy" '
        f'content="{policy}"><style>{STYLE}</style></head><body>'
        f"<h1>{name}</h1><p class=soft>{report.record.steps} steps, {len(report.diagnosis.checked)} symptoms; "
        f"a decision looks at {report.record.window} steps</p>"
        f"{_lineage(report)}{findings}{_early(report)}</body></html>\n"
    )


def _section(report: DiagnosisReport, finding: Finding) -> str:
    parts = [
        f'<section class="{finding.severity.value}"><h2>{html_text(finding.title)}</h2>',
        f"<p class=soft>{finding.severity.value} · {html_text(finding.rule)} · "
        f"{html_text(', '.join(finding.requirements))} · steps {finding.steps[0]} to {finding.steps[1]}</p>",
        _list([html_text(sentence) for sentence in finding.evidence]),
        curves(report.record, finding),
        _list([f"<code>{html_text(each.where)}</code> {html_text(each.summary)}" for each in finding.witnesses]),
        f"<p>{html_text(finding.advice)}</p>" if finding.advice else "",
        _changes(finding),
    ]
    command = report.command if finding is report.first else None
    shown = [*([command] if command else []), *finding.look]
    if shown:
        parts.append(f"<pre>{html_text(chr(10).join(shown))}</pre>")
    return "".join([*parts, "</section>"])


def _changes(finding: Finding) -> str:
    rows = []
    for number, proposal in enumerate(finding.proposals):
        now = f" <span class=soft>(now {html_text(', '.join(proposal.current))})</span>" if proposal.current else ""
        label = ("<dt>Change</dt>", "<dt>If that is done or does not help</dt>", "")[min(number, 2)]
        rows.append(f"{label}<dd><code>{html_text(str(proposal))}</code>{now}<br>{html_text(proposal.why)}</dd>")
    if finding.expect:
        rows.append(f"<dt>What should then be seen</dt><dd>{html_text(finding.expect)}</dd>")
    return f"<dl>{''.join(rows)}</dl>" if rows else ""


def _lineage(report: DiagnosisReport) -> str:
    rows = []
    for link in report.links:
        changed = ", ".join(map(str, link.settings)) or "nothing"
        effects = "; ".join(
            f"{e.name} {short(e.change.before)} → {short(e.change.after)} (± {short(2 * e.change.error)}): {e.verdict}"
            for e in link.effects
        )
        rows.append(html_text(f"{link.child} changed {changed} of {link.parent}: {effects or link.verdict}"))
    return _list([*rows, *map(html_text, report.remarks)])


def _early(report: DiagnosisReport) -> str:
    early = ", ".join(report.diagnosis.early)
    return f"<p class=soft>Too early to tell: {html_text(early)}</p>" if early else ""


def _list(items: list[str]) -> str:
    return f"<ul>{''.join(f'<li>{item}</li>' for item in items)}</ul>" if items else ""


# -- curves ----------------------------------------------------------------------------------------------------------


def curves(record: Record, finding: Finding) -> str:
    """Return the metrics of a finding as SVG, with the examined steps shaded; empty if no metric was measured."""
    import matplotlib
    from matplotlib.figure import Figure

    from mtrl.figures.style import COLOURS, STYLE, to_svg

    measured = [key for key in finding.metrics if len(record.series(key)) > 1][:CURVES]
    if not measured:
        return ""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(3.4 * len(measured), 2.5), layout="constrained")
        panels = figure.subplots(1, len(measured), squeeze=False)[0]
        for axes, key, colour in zip(panels, measured, COLOURS, strict=False):
            series = record.series(key)
            marker = "o" if len(series) < 15 else None
            axes.plot(series.steps, series.values, color=colour, linewidth=1.5, marker=marker, markersize=4)
            if finding.steps[0] > series.steps[0] + 1 or finding.steps[1] < series.steps[-1]:
                axes.axvspan(*finding.steps, color="#999999", alpha=0.12, linewidth=0)
            axes.set_title(key, fontsize=9)
        return to_svg(figure, finding.rule)
