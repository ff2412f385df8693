"""Results of an evaluation as short tables for the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rich.table import Table
from rich.text import Text

from mtrl.engines.endpoints.budget import format_spending
from mtrl.evaluation.comparison import ModelComparison
from mtrl.evaluation.report import KINDS, ModelReport, ModelsReport
from mtrl.evaluation.results import ModelResult
from mtrl.scoring.statistics import Rate
from mtrl.utils.text import MISSING, decimal, one_line, percent, whole

Cell = Callable[[ModelResult], str]


def tables_of(report: ModelsReport) -> Iterator[Table]:
    """Yield one table for each kind of episodes."""
    for kind in KINDS:
        models = [model for model in report.models if kind in model.results]
        if models:
            yield table_of(kind, models, [c for c in report.comparisons if c.kind == kind])


def table_of(kind: str, models: list[ModelReport], comparisons: list[ModelComparison]) -> Table:
    """Return a table with one column per model and one line per metric and source of a mixture. The evaluated model
    comes first, then the models that it is compared with."""
    table = Table(box=None, padding=(0, 3, 0, 0), header_style="bold", pad_edge=False)
    table.add_column(Text(kind, style="cyan"), no_wrap=True)
    for model in models:
        table.add_column(Text(one_line(model.label, 40)), justify="right", no_wrap=True)
    for name, cell in lines([model.results[kind] for model in models]):
        table.add_row(Text(name, style="dim"), *(Text(cell(model.results[kind])) for model in models))
    for source in dict.fromkeys(source for model in models for source in model.by_source):
        results = (model.by_source.get(source, {}).get(kind) for model in models)
        cells = (MISSING if result is None else interval(result.success) for result in results)
        table.add_row(Text(f"success, {source}", style="dim"), *map(Text, cells))
    found = {c.other: c for c in comparisons}
    if found:
        for name, show in (("better by, points", difference), ("p", p_value)):
            cells = (found.get(model.label) for model in models)
            table.add_row(Text(name, style="dim"), *(Text("" if c is None else show(c)) for c in cells))
    return table


def lines(results: list[ModelResult]) -> Iterator[tuple[str, Cell]]:
    """Yield the name and the cell function of each metric that any of the results has."""
    yield "success", lambda result: interval(result.success)
    for k in sorted({each.k for result in results for each in result.pass_at_k}):
        yield f"pass@{k}", lambda result, k=k: pass_at(result, k)  # type: ignore[misc]
    yield "reward", lambda result: decimal(result.reward.mean)
    yield "claims", lambda result: percent(result.agreement.claims)
    yield "completion", lambda result: percent(result.completion.value)
    yield "episodes", lambda result: whole(result.episodes)
    if any(result.failures for result in results):
        yield "failed", lambda result: whole(sum(result.failures.values()))


def usage_lines(report: ModelsReport) -> Iterator[str]:
    """Yield a line with the usage and the cost of each endpoint and judge."""
    for label, usage in report.spending:
        yield f"{one_line(label, 60)}: {format_spending(usage)}"


def interval(rate: Rate) -> str:
    return f"{percent(rate.value)} [{100 * rate.low:.1f}, {100 * rate.high:.1f}]"


def pass_at(result: ModelResult, k: int) -> str:
    return next((interval(each.rate) for each in result.pass_at_k if each.k == k), MISSING)


def difference(comparison: ModelComparison) -> str:
    d = comparison.difference
    return f"{100 * d.value:+.1f} [{100 * d.low:+.1f}, {100 * d.high:+.1f}]"


def p_value(comparison: ModelComparison) -> str:
    return f"{comparison.p_adjusted:.3g}"
