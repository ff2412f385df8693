"""The tables of a report, as text: the same for Markdown and HTML."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mtrl.engines.endpoints.budget import format_usd
from mtrl.evaluation.comparison import ModelComparison
from mtrl.evaluation.remarks import points
from mtrl.evaluation.report import ModelReport, ModelsReport
from mtrl.evaluation.results import ModelResult
from mtrl.scoring.measures import Spread
from mtrl.scoring.statistics import Rate
from mtrl.scoring.tool_use import ToolUse
from mtrl.utils.text import MISSING, one_line, percent, short, whole

NAME_CHARACTERS = 60
SUCCESS = ("success", "completion", "mean reward", "solved by the reward", "episodes", "failed")
"""Head of the columns of `_success_row`."""


@dataclass(frozen=True)
class Table:
    """A table of unescaped texts. The first column holds names, the others hold numbers."""

    head: list[str]
    rows: list[list[str]]
    note: str = ""


def level_text(report: ModelsReport) -> str:
    """Format the level of the confidence intervals: 95%, 99.9%."""
    return f"{100 * report.method['confidence']:.6g}%"


def headline(report: ModelsReport) -> Table:
    rows = [_success_row(name, result) for name, _, result in each_result(report)]
    level = level_text(report)
    note = (
        f"Success: the scorer gives at least {short(report.method['success_threshold'])}; completion: the "
        "episode holds an answer that the task can read, right or wrong. "
        f"In brackets the {level} interval, over rows. Failed episodes are in no rate."
    )
    return Table(["model", *SUCCESS], rows + _all_failed(report), note)


def sources(report: ModelsReport) -> Table | None:
    """Return the results of each source of a mixture; None for an evaluation of one task."""
    rows = [
        _success_row(f"{source}: {name(model.label)}, {kind}", result)
        for source in dict.fromkeys(source for model in report.models for source in model.by_source)
        for model in report.models
        for kind, result in model.by_source.get(source, {}).items()
    ]
    return Table(["source", *SUCCESS], rows) if rows else None


def _success_row(label: str, result: ModelResult) -> list[str]:
    return [
        label,
        rate(result.success),
        rate(result.completion),
        short(result.reward.mean),
        percent(result.agreement.claims),
        whole(result.episodes),
        whole(sum(result.failures.values())),
    ]


def comparison(report: ModelsReport) -> Table | None:
    if not report.comparisons:
        return None
    rows = [
        [
            f"{name(c.model)} against {name(c.other)}, {c.kind}",
            f"{percent(c.other_value)} → {percent(c.value)}",
            f"{points(c.difference.value)} ({points(c.difference.low)} to {points(c.difference.high)})",
            f"{c.paired.wins} / {c.paired.losses} / {c.paired.ties}",
            p_value(c.paired.p_value),
            p_value(c.p_adjusted),
            whole(c.rows),
        ]
        for c in report.comparisons
    ]
    tests = sorted({f"{c.kind}: {c.test}" for c in report.comparisons})
    note = (
        f"On the same rows. Differences in points, with their {level_text(report)} interval. "
        f"p: two-sided; {'; '.join(tests)}. p (Holm): for the number of models compared with."
    )
    head = ["models", "success", "difference", "won / lost / tied", "p", "p (Holm)", "rows"]
    return Table(head, rows, note)


def pass_at_k(report: ModelsReport) -> Table | None:
    """Return pass@k by the scorer and by the reward; None if no model has sampled episodes."""
    rows = [
        [
            f"{name(model.label)}, k = {scored.k}",
            rate(scored.rate),
            _pass_difference(report, model, scored.k, scored.rows),
            rate(rewarded.rate),
            whole(scored.rows),
        ]
        for model in report.models
        if (result := model.results.get("sampled")) is not None
        for scored, rewarded in zip(result.pass_at_k, result.reward_pass_at_k, strict=True)
    ]
    note = (
        "The chance that at least one of k samples succeeds, estimated without bias (Chen et al. 2021, eq. 1): by the "
        f"scorer from {short(report.method['success_threshold'])} on, and by the reward from "
        f"{short(report.method['claim_threshold'])} on."
    )
    ahead = f"{name(report.main.label)} is ahead by"
    return Table(["model", "pass@k", ahead, "pass@k by the reward", "rows"], rows, note) if rows else None


def agreement(report: ModelsReport) -> Table:
    rows = [
        [
            label,
            rate(result.agreement.agree),
            percent(result.agreement.claims),
            percent(result.success.value),
            whole(result.agreement.lenient),
            whole(result.agreement.strict),
            MISSING if result.agreement.ranking is None else f"{result.agreement.ranking:.3f}",
        ]
        for label, _, result in each_result(report)
    ]
    head = ["model", "agreement", "solved by the reward", "solved by the scorer", "lenient", "strict", "ranking"]
    note = (
        f"The reward counts an episode as solved from {short(report.method['claim_threshold'])} on. Lenient: only the "
        "reward counts it; strict: only the scorer. Ranking: the probability that a solved episode has a "
        "higher reward than an unsolved one (0.5: chance)."
    )
    return Table(head, rows, note)


def ends(report: ModelsReport) -> Table:
    found = {reason for _, _, result in each_result(report) for reason in result.stops}
    reasons = sorted(found, key=lambda reason: (reason != "done", reason))
    rows = [
        [label, *(percent(result.stops.get(reason, 0) / result.episodes) for reason in reasons)]
        for label, _, result in each_result(report)
    ]
    return Table(["model", *reasons], rows)


def budgets(report: ModelsReport) -> Table:
    rows = [
        [label, percent(b.out_of_turns), percent(b.at_token_cap), percent(b.cut_turns), percent(b.out_of_context)]
        for label, b in ((label, result.budgets) for label, _, result in each_result(report))
    ]
    head = ["model", "out of turns", "with a cut turn", "turns that were cut", "context full"]
    note = (
        "Shares of episodes, of turns in the column before the last. Out of turns: max_turns without a final answer, "
        "to stay below 10%; cut: at the limit of tokens per turn, to stay below 5% of the episodes."
    )
    return Table(head, rows, note)


def lengths(report: ModelsReport) -> Table:
    rows = []
    for label, _, result in each_result(report):
        found = result.lengths
        rows.append([label, *map(_spread, (found.turns, found.response_tokens, found.episode_tokens))])
    note = "Mean / 95th percentile / maximum."
    if any(model.usage for model in report.models):
        note += " Tokens of an endpoint are those that its provider counted, with a tokenizer of its own."
    return Table(["model", "turns", "tokens of a turn", "tokens of an episode"], rows, note)


def tools(report: ModelsReport) -> Table | None:
    """Return tool calls: one row per tool, one column per model and kind."""
    found = [(label, {tool.name: tool for tool in result.tools}) for label, _, result in each_result(report)]
    names = list(dict.fromkeys(key for _, each in found for key in each))
    rows = [[name(key), *(_calls(each.get(key)) for _, each in found)] for key in names]
    note = (
        "Calls per episode; in brackets how many of all calls were malformed or answered by an error. Tools are those "
        "of tool calls and, in plain text, elements such as <sql> and blocks of shell or Python."
    )
    return Table(["tool", *(label for label, _ in found)], rows, note) if rows else None


def fields(report: ModelsReport) -> Table | None:
    """Return measures: one row per field, format and other measure, one column per model and kind."""
    found = [(label, result.measures) for label, _, result in each_result(report)]
    names = list(dict.fromkeys(key for _, each in found for key in [*each.fields]))
    others = list(dict.fromkeys(key for _, each in found for key in each.others))
    rows: list[list[str]] = []
    if any(each.format for _, each in found):
        rows.append(["format", *(_maybe(each.format) for _, each in found)])
    if names:
        rows.append(["all fields, mean", *(_maybe(each.field_accuracy) for _, each in found)])
    rows += [[name(key), *(_maybe(each.fields.get(key)) for _, each in found)] for key in names]
    rows += [[name(key), *(_maybe(each.others.get(key)) for _, each in found)] for key in others]
    note = (
        "Measured by the family's scorer. Format: the answer has the required form, right or wrong. "
        "Fields: the mean over episodes of their share of right fields, while success requires all of them."
    )
    return Table(["measure", *(label for label, _ in found)], rows, note) if rows else None


def components(report: ModelsReport) -> Table | None:
    found = [(label, result.components) for label, _, result in each_result(report)]
    names = list(dict.fromkeys(key for _, each in found for key in each))
    rows = [[name(key), *(_number(each.get(key)) for _, each in found)] for key in names]
    note = "Mean sum of each part of the reward over an episode."
    return Table(["part of the reward", *(label for label, _ in found)], rows, note) if rows else None


def spending(report: ModelsReport) -> Table | None:
    """Return the usage of endpoints: one row per model or judge that was called over an API."""
    columns = ("requests", "retries", "prompt_tokens", "cached_tokens", "completion_tokens")
    rows = []
    for label, usage in report.spending:
        cost = format_usd(usage["cost"]) if "cost" in usage else MISSING
        rows.append([name(label), *(whole(usage[column]) for column in columns), cost, _unconfirmed(usage)])
    head = ["model", "requests", "repeated", "prompt tokens", "cached", "completion tokens", "cost", "unconfirmed"]
    note = (
        "Tokens as the provider counted them, those of failed episodes included; the cost is by the prices of the "
        "configuration. Unconfirmed: requests whose answer never came whole, and what they cost on top at most."
    )
    return Table(head, rows, note) if rows else None


def method(report: ModelsReport) -> Table:
    rows = [[key.replace("_", " "), _flat(value)] for key, value in report.method.items() if value is not None]
    for model in report.models:
        rows.append([f"model {name(model.label)}", _flat(model.source)])
    return Table(["", ""], rows)


# -- texts -----------------------------------------------------------------------------------------------------------


def each_result(report: ModelsReport) -> Iterator[tuple[str, ModelReport, ModelResult]]:
    """Yield the name of the row, the model and the result, for every model and kind."""
    for model in report.models:
        for kind, result in model.results.items():
            yield f"{name(model.label)}, {kind}", model, result


def name(text: str) -> str:
    """Return a name of unknown origin as one line."""
    return one_line(text, NAME_CHARACTERS)


def rate(value: Rate) -> str:
    return f"{percent(value.value)} ({100 * value.low:.1f}–{100 * value.high:.1f})"


def p_value(p: float) -> str:
    return "< 0.0001" if p < 1e-4 else f"{p:.2g}" if p < 0.1 else f"{p:.2f}"


def changes(comparison: ModelComparison, what: str, limit: int) -> str:
    """Return a sentence such as `12 rows fixed: a, b (0% → 50%), …`."""
    rows = comparison.fixed if what == "fixed" else comparison.broken
    single = comparison.test.startswith("exact")
    shown = [name(c.row) + ("" if single else f" ({c.before:.0%} → {c.after:.0%})") for c in rows[:limit]]
    more = f", and {len(rows) - limit} more in report.json" if len(rows) > limit else ""
    counted = f"{len(rows)} row{'' if len(rows) == 1 else 's'} {what if single else _sampled_word(what)}"
    return f"{counted}: {', '.join(shown)}{more}" if rows else counted


def _sampled_word(what: str) -> str:
    return "better" if what == "fixed" else "worse"


def _pass_difference(report: ModelsReport, model: ModelReport, k: int, rows: int) -> str:
    """Return the difference in pass@k to a model, with the number of its rows if it differs from `rows`."""
    if model is report.main:
        return ""
    found = (d for c in report.comparisons if c.other == model.label for d in c.pass_at_k if d.k == k)
    d = next(found, None)
    if d is None:
        return MISSING
    on = "" if rows == d.rows else f", {d.rows} rows"
    return f"{points(d.difference.value)} ({points(d.difference.low)} to {points(d.difference.high)}{on})"


def _all_failed(report: ModelsReport) -> list[list[str]]:
    return [
        [f"{name(model.label)}, {kind}", *[MISSING] * 4, "0", whole(sum(reasons.values()))]
        for model in report.models
        for kind, reasons in model.lost.items()
    ]


def _spread(value: Spread | None) -> str:
    return MISSING if value is None else " / ".join(map(short, (value.mean, value.p95, value.max)))


def _calls(tool: ToolUse | None) -> str:
    if tool is None:
        return MISSING
    return short(tool.calls_per_episode) + (f" ({tool.errors:,} wrong)" if tool.errors else "")


def _maybe(value: Rate | None) -> str:
    return MISSING if value is None else rate(value)


def _number(value: float | None) -> str:
    return MISSING if value is None else short(value)


def _unconfirmed(usage: Mapping[str, float]) -> str:
    """Format the number of unconfirmed requests, with the upper bound of their cost where it is known."""
    count = whole(usage["unconfirmed_requests"])
    has_cost = usage["unconfirmed_requests"] and "cost_unconfirmed" in usage
    return f"{count} ({format_usd(usage['cost_unconfirmed'])})" if has_cost else count


def _flat(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_flat(item)}" for key, item in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(map(_flat, value)) or "none"
    return f"{value:,.10g}" if isinstance(value, float) else one_line(value, 300)
