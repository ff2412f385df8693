"""report.md: the report for a terminal or a pull request."""

from __future__ import annotations

import re

from mtrl.evaluation import report_tables as tables
from mtrl.evaluation.remarks import Level, Remark
from mtrl.evaluation.report import ModelsReport
from mtrl.evaluation.report_tables import Table
from mtrl.utils.text import one_line, short

ROWS_NAMED = 12
"""Maximum number of changed rows that are named; report.json has all."""
DISAGREEMENTS = 20
RESPONSE_CHARACTERS = 160
_MARKUP = re.compile(r"([\\`*\[\]|~]|<(?=[A-Za-z/!?])|&(?=[#A-Za-z])|(?<![^\W_])_|_(?![^\W_]))")
"""Characters that Markdown reads as markup; an underscore within a word is not one."""


def to_markdown(report: ModelsReport) -> str:
    parts = [
        f"# Evaluation of {escape(tables.name(report.main.label))} on {escape(tables.name(report.name))}",
        markdown_table(tables.headline(report)),
        "## Two questions",
        f"**Does it carry over to new rows?** {escape(report.generalisation)}",
        f"**Does a judge other than the reward confirm it?** {escape(report.independence)}",
    ]
    if report.remarks:
        parts += ["## To know", "\n".join(map(_remark, report.remarks))]
    for title, table in (
        ("Sources", tables.sources(report)),
        ("Comparison", tables.comparison(report)),
        ("pass@k", tables.pass_at_k(report)),
        ("Reward against score", tables.agreement(report)),
        ("Parts of the reward", tables.components(report)),
        ("Fields and format", tables.fields(report)),
        ("How episodes ended", tables.ends(report)),
        ("Budgets", tables.budgets(report)),
        ("Turns and tokens", tables.lengths(report)),
        ("Tools", tables.tools(report)),
        ("Spending", tables.spending(report)),
    ):
        if table is not None:
            parts += [f"## {title}", markdown_table(table)]
        if title == "Comparison" and report.comparisons:
            parts.append(_changes(report))
    if report.disagreements:
        parts += ["## Where reward and scorer disagree", _disagreements(report)]
    parts += ["## Method", markdown_table(tables.method(report)), f"Made {report.created}."]
    return "\n\n".join(parts) + "\n"


def escape(text: str) -> str:
    """Return one line of text that Markdown and a terminal show literally."""
    return _MARKUP.sub(r"\\\1", one_line(text, 2000))


def markdown_table(table: Table) -> str:
    """Return a Markdown table. Columns are as wide as their widest text, with names left-aligned and numbers
    right-aligned."""
    rows = [[escape(cell) for cell in row] for row in table.rows]
    head = [escape(cell) for cell in table.head]
    widths = [max(3, *(len(row[column]) for row in [head, *rows])) for column in range(len(head))]
    numbers = any(head[1:])
    rule = ["-" * width if place == 0 or not numbers else "-" * (width - 1) + ":" for place, width in enumerate(widths)]
    lines = [_line(head, widths, numbers), f"| {' | '.join(rule)} |", *(_line(row, widths, numbers) for row in rows)]
    return "\n".join(lines) + (f"\n\n{escape(table.note)}" if table.note else "")


def _line(cells: list[str], widths: list[int], numbers: bool) -> str:
    padded = [
        cell.ljust(width) if place == 0 or not numbers else cell.rjust(width)
        for place, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return f"| {' | '.join(padded)} |"


def _remark(remark: Remark) -> str:
    about = f"{tables.name(remark.about)}: "
    mark = {Level.PROBLEM: "**Problem.** ", Level.CAUTION: "**Careful.** ", Level.NOTE: ""}[remark.level]
    return f"- {mark}{escape(about + remark.text)}{' _' + escape(remark.change) + '_' if remark.change else ''}"


def _changes(report: ModelsReport) -> str:
    lines = []
    for c in report.comparisons:
        lines.append(f"- {escape(tables.name(c.other))}, {c.kind}")
        lines += [f"  - {escape(tables.changes(c, what, ROWS_NAMED))}" for what in ("fixed", "broken")]
    return "\n".join(lines)


def _disagreements(report: ModelsReport) -> str:
    shown = report.disagreements[:DISAGREEMENTS]
    rows = [
        [d.verdict.value, f"{d.model}, {d.kind}", d.id, d.row, short(d.reward), short(d.score or 0.0),
         one_line(d.last_response, RESPONSE_CHARACTERS)]
        for d in shown
    ]  # fmt: skip
    head = ["verdict", "model", "trajectory", "row", "reward", "score", "last response"]
    more = len(report.disagreements) - len(shown)
    note = f"{more} more are in report.json, all of them as whole conversations in trajectories/." if more else ""
    return markdown_table(Table(head, rows, note))
