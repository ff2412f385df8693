"""report.html: one self-contained file with plots, and with the conversations on which reward and scorer disagree."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from mtrl.evaluation import report_plots as plots
from mtrl.evaluation import report_tables as tables
from mtrl.evaluation.comparison import ModelComparison
from mtrl.evaluation.remarks import Remark, points
from mtrl.evaluation.report import ModelsReport
from mtrl.evaluation.report_conversation import conversation
from mtrl.evaluation.report_style import CSS
from mtrl.evaluation.report_tables import Table
from mtrl.scoring.statistics import Rate
from mtrl.utils.text import html_text, percent, short

CONVERSATIONS = 30
"""Maximum number of conversations on the page. report.json has all disagreements, and trajectories/ has their whole
conversations."""
ROWS_NAMED = 60
COMPARED = 2
"""Maximum number of differences among the figures at the top."""
POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""Content security policy: the page may load no file and run no script."""


def to_html(report: ModelsReport) -> str:
    sections = [
        ("questions", "Two questions", _questions(report)),
        ("remarks", "To know", _remarks(report.remarks)),
        ("sources", "Sources", _table(tables.sources(report))),
        ("comparison", "Comparison", _comparison(report)),
        ("passk", "pass@k", _passes(report)),
        ("reward", "Reward against score", _reward(report)),
        ("fields", "Fields and format", _fields(report)),
        ("course", "How episodes went", _course(report)),
        ("tools", "Tools", _tools(report)),
        ("disagreements", "Where reward and scorer disagree", _disagreements(report)),
        ("spending", "Spending", _table(tables.spending(report))),
        ("method", "Method", _table(tables.method(report), "words")),
    ]
    shown = [(anchor, title, body) for anchor, title, body in sections if body]
    links = "".join(f'<a href="#{anchor}">{title}</a>' for anchor, title, _ in shown)
    bodies = "".join(f'<section><h2 id="{anchor}">{title}</h2>{body}</section>' for anchor, title, body in shown)
    title = f"Evaluation of {tables.name(report.main.label)} on {tables.name(report.name)}"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{html_text(title)}</title><style>{CSS}</style></head><body>"
        f'<header><h1>{html_text(title)}</h1><p class="sub">{html_text(_subtitle(report))}</p>'
        f"<nav>{links}</nav></header>"
        f"<main>{_headline(report)}{bodies}</main>"
        f"<footer>Made {html_text(report.created)} by mtrl.evaluate. The numbers are in report.json.</footer>"
        "</body></html>\n"
    )


def _subtitle(report: ModelsReport) -> str:
    others = [tables.name(model.label) for model in report.models[1:]]
    against = f", against {', '.join(others)}" if others else ""
    first = next(iter(report.main.results.values()))
    return f"{first.rows} rows of the {report.method['split']} split{against}"


# -- sections --------------------------------------------------------------------------------------------------------


def _headline(report: ModelsReport) -> str:
    facts: list[tuple[str, str]] = []
    for kind, result in report.main.results.items():
        facts.append((percent(result.success.value), f"success, {kind} ({_ends(result.success)})"))
    result = next(iter(report.main.results.values()))
    if (accuracy := result.measures.field_accuracy) is not None:
        facts.append((percent(accuracy.value), f"field accuracy ({_ends(accuracy)})"))
    facts.append((percent(result.completion.value), "completion: episodes with an answer that can be read"))
    for c in report.comparisons[:COMPARED]:
        low, high = points(c.difference.low), points(c.difference.high)
        facts.append(
            (points(c.difference.value), f"points ahead of {tables.name(c.other)} ({low} to {high}), {c.kind}")
        )
    facts.append((short(result.reward.mean), "mean reward"))
    if lost := sum(result.failures.values()):
        facts.append((f"{lost:,}", "episodes that failed, in no rate"))
    cards = "".join(f'<div class="card fact"><b>{escape(b)}</b><span>{html_text(s)}</span></div>' for b, s in facts)
    figure = _figure("Success, as the scorer judges it", plots.success(report))
    second = _figure("Ahead of the others by", plots.differences(report)) if report.comparisons else ""
    return f'<div class="facts">{cards}</div>{_grid(figure, second)}{_table(tables.headline(report))}'


def _questions(report: ModelsReport) -> str:
    return _grid(
        f"<h3>Does it carry over to new rows?</h3><p>{html_text(report.generalisation)}</p>",
        f"<h3>Does a judge other than the reward confirm it?</h3><p>{html_text(report.independence)}</p>",
    )


def _remarks(remarks: Sequence[Remark]) -> str:
    return f'<ul class="remarks">{"".join(map(_remark, remarks))}</ul>' if remarks else ""


def _remark(remark: Remark) -> str:
    level = remark.level.value
    about = f"<b>{html_text(tables.name(remark.about))}</b> "
    change = f'<span class="change">{html_text(remark.change)}</span>' if remark.change else ""
    return f'<li class="{level}"><span class="tag">{level}</span>{about}{html_text(remark.text)}{change}</li>'


def _comparison(report: ModelsReport) -> str:
    table = tables.comparison(report)
    return _table(table) + "".join(map(_changed, report.comparisons))


def _changed(comparison: ModelComparison) -> str:
    title = f"Rows that went otherwise than with {tables.name(comparison.other)}, {comparison.kind}"
    lines = "".join(f"<p>{html_text(tables.changes(comparison, what, ROWS_NAMED))}</p>" for what in ("fixed", "broken"))
    return f"<details><summary>{html_text(title)}</summary><div>{lines}</div></details>"


def _passes(report: ModelsReport) -> str:
    table, curve = tables.pass_at_k(report), plots.pass_at_k(report)
    if table is None:
        return ""
    return (_grid(_figure("pass@k with its interval", curve)) if curve else "") + _table(table)


def _reward(report: ModelsReport) -> str:
    figure = _figure("Reward of every episode, by verdict of the scorer", plots.reward_against_score(report))
    return _grid(figure) + _table(tables.agreement(report)) + _table(tables.components(report))


def _fields(report: ModelsReport) -> str:
    table, figure = tables.fields(report), plots.fields(report)
    if table is None:
        return ""
    return (_grid(_figure("Fields of the answer that are right", figure)) if figure else "") + _table(table)


def _course(report: ModelsReport) -> str:
    tokens = plots.tokens(report)
    figures = _grid(
        _figure("Ends of episodes", plots.stops(report)),
        _figure("Turns of an episode", plots.turns(report)),
        _figure("Tokens of an episode: share that has at most so many", tokens) if tokens else "",
    )
    return figures + "".join(map(_table, (tables.ends(report), tables.budgets(report), tables.lengths(report))))


def _tools(report: ModelsReport) -> str:
    figure = plots.tools(report)
    return (_grid(_figure("Calls of an episode", figure)) if figure else "") + _table(tables.tools(report))


def _disagreements(report: ModelsReport) -> str:
    if not report.disagreements:
        return "<p>There are none.</p>"
    shown = report.disagreements[:CONVERSATIONS]
    more = len(report.disagreements) - len(shown)
    words = (
        "Lenient: the reward counts it as solved and the scorer does not. Strict: the reverse. Long messages are cut; "
        "they are whole in trajectories/ beside this page, in the file of their model and kind."
    )
    if more:
        words += f" {more} more disagreements are in report.json and there."
    return f'<p class="below">{words}</p>{"".join(map(conversation, shown))}'


# -- parts -----------------------------------------------------------------------------------------------------------


def _table(table: Table | None, look: str = "numbers") -> str:
    if table is None:
        return ""
    head = f"<thead>{_row(table.head, 'th')}</thead>" if any(table.head) else ""
    rows = "".join(_row(cells, "td") for cells in table.rows)
    note = f'<p class="below">{html_text(table.note)}</p>' if table.note else ""
    return f'<div class="scroll"><table class="{look}">{head}<tbody>{rows}</tbody></table></div>{note}'


def _row(cells: Sequence[str], tag: str) -> str:
    return f"<tr>{''.join(f'<{tag}>{html_text(cell)}</{tag}>' for cell in cells)}</tr>"


def _grid(*cards: str) -> str:
    return f'<div class="grid">{"".join(f"<div class=card>{card}</div>" for card in cards if card)}</div>'


def _figure(caption: str, svg: str) -> str:
    return f"<figure><figcaption>{escape(caption)}</figcaption>{svg}</figure>"


def _ends(rate: Rate) -> str:
    return f"{100 * rate.low:.1f} to {100 * rate.high:.1f}"
