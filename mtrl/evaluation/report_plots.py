"""The plots of report.html, as SVG with the colours and the font of the page."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from mtrl.evaluation.report import KINDS, ModelsReport
from mtrl.evaluation.report_style import COLOURS
from mtrl.evaluation.report_tables import each_result, level_text, name
from mtrl.evaluation.results import ModelResult
from mtrl.figures.style import STYLE, to_svg
from mtrl.scoring.agreement import succeeded
from mtrl.scoring.measures import episode_tokens, known
from mtrl.scoring.statistics import Rate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, MUTED, RULE = "#010203", "#040506", "#070809"
"""Placeholders of the page's colours until the SVG is written."""
SERIES = [COLOURS[each] for each in ("blue", "orange", "green", "purple", "grey")]
WIDTH = 4.4
"""Width of a plot in inches. At 400 pixels, its text is as large as the text of the page."""
NAMED = 12
"""Maximum number of models, tools or fields in one plot; the tables have all."""
POINTS = 400
"""Maximum number of episodes in one column of a scatter plot; a random sample of more episodes is drawn."""


def success(report: ModelsReport) -> str:
    """Plot success with its interval, and the share of claims of the reward, of every model and kind."""
    rows = [(label, result) for label, _, result in each_result(report)][:NAMED]

    def draw(axes: Axes) -> None:
        colours = _colours(report)
        for place, (label, result) in enumerate(rows):
            rate, colour = result.success, colours[label.rpartition(", ")[0]]
            axes.barh(place, rate.value, height=0.5, color=colour, alpha=0.85 if label.endswith("greedy") else 0.45)
            _interval(axes, rate, place)
            axes.plot(result.agreement.claims, place, "D", color=MUTED, markersize=5, markerfacecolor="none")
        axes.plot(
            [], [], "D", color=MUTED, markersize=5, markerfacecolor="none", linestyle="", label="the reward's claim"
        )
        axes.plot([], [], color=INK, linewidth=1.6, label=f"{level_text(report)} interval")
        _categories(axes, [label for label, _ in rows])
        _shares(axes.xaxis)
        axes.set_xlim(0, 1.02)
        _legend(axes)

    return draw_svg("success", 0.9 + 0.45 * len(rows), draw)


def differences(report: ModelsReport) -> str:
    """Plot the difference to every other model with its interval, and a line at 0."""
    shown = report.comparisons[:NAMED]

    def draw(axes: Axes) -> None:
        axes.axvline(0, color=MUTED, linewidth=1)
        for place, c in enumerate(shown):
            d = c.difference
            colour = SERIES[2] if d.low > 0 else SERIES[1] if d.high < 0 else COLOURS["grey"]
            axes.plot([100 * d.low, 100 * d.high], [place, place], color=colour, linewidth=2.4)
            axes.plot(100 * d.value, place, "o", color=colour, markersize=7)
        _categories(axes, [f"{name(c.other)}, {c.kind}" for c in shown])
        axes.set_xlabel("points of success", color=MUTED)
        reach = max(abs(100 * end) for c in shown for end in (c.difference.low, c.difference.high))
        axes.set_xlim(-1.1 * max(reach, 5), 1.1 * max(reach, 5))

    return draw_svg("differences", 1.1 + 0.42 * len(shown), draw)


def pass_at_k(report: ModelsReport) -> str | None:
    """Plot pass@k over k with its interval; None if there is only one k."""
    curves = [
        (model.label, model.results["sampled"].pass_at_k) for model in report.models if "sampled" in model.results
    ]
    if not any(len(curve) > 1 for _, curve in curves):
        return None

    def draw(axes: Axes) -> None:
        colours = _colours(report)
        for label, curve in curves[:NAMED]:
            ks = [each.k for each in curve]
            axes.plot(ks, [each.rate.value for each in curve], "o-", color=colours[name(label)], label=name(label))
            low, high = [e.rate.low for e in curve], [e.rate.high for e in curve]
            axes.fill_between(ks, low, high, color=colours[name(label)], alpha=0.15, linewidth=0)
        ticks = sorted({each.k for _, curve in curves for each in curve})
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [str(k) for k in ticks])
        axes.minorticks_off()
        axes.set_xlabel("k, samples of a row", color=MUTED)
        axes.set_ylim(0, 1.02)
        _shares(axes.yaxis)
        _legend(axes)

    return draw_svg("pass_at_k", 3.2, draw)


def reward_against_score(report: ModelsReport) -> str:
    """Plot the reward of every episode, with solved and unsolved episodes (by the scorer) side by side."""
    shown = _of_one_kind(report)[:4]
    threshold = report.method["success_threshold"]

    def draw(axes: Axes) -> None:
        colours, rng = _colours(report), random.Random(0)
        places, labels = [], []
        for index, (label, result) in enumerate(shown):
            for solved in (False, True):
                place = index * 2.4 + solved
                rewards = [e.trajectory.reward for e in result.seen if succeeded(e.trajectory, threshold) == solved]
                _strip(axes, place, rewards, colours[label], rng)
                places.append(place)
                labels.append(f"{'solved' if solved else 'not solved'}\n{len(rewards)}")
            axes.plot([], [], "o", color=colours[label], markersize=5, label=label)
        axes.axhline(
            report.method["claim_threshold"], color=INK, linewidth=1, linestyle="--", label="the reward claims"
        )
        axes.set_xticks(places, labels, fontsize=9 if len(shown) < 3 else 7.5)
        axes.set_ylabel("reward", color=MUTED)
        axes.grid(False, axis="x")
        _legend(axes)

    return draw_svg("reward_against_score", 3.5, draw)


def stops(report: ModelsReport) -> str:
    """Plot the shares of stop reasons, with one bar per model and kind."""
    rows = [(label, result) for label, _, result in each_result(report)][:NAMED]
    totals: dict[str, float] = {}
    for _, result in rows:
        for reason, count in result.stops.items():
            totals[reason] = totals.get(reason, 0) + count / result.episodes
    reasons = sorted(totals, key=lambda reason: (reason != "done", -totals[reason]))
    palette = [COLOURS[each] for each in ("green", "orange", "purple", "blue", "grey")]
    colours = {reason: palette[i if "done" in reasons else i + 1] for i, reason in enumerate(reasons[:4])}

    def draw(axes: Axes) -> None:
        for place, (_, result) in enumerate(rows):
            left = 0.0
            for reason in reasons:
                share = result.stops.get(reason, 0) / result.episodes
                colour = colours.get(reason, COLOURS["grey"])
                axes.barh(place, share, left=left, height=0.5, color=colour, label=None if place else reason)
                left += share
        _categories(axes, [label for label, _ in rows])
        _shares(axes.xaxis)
        axes.set_xlim(0, 1)
        _legend(axes)

    return draw_svg("stops", 0.95 + 0.45 * len(rows), draw)


def turns(report: ModelsReport) -> str:
    """Plot the distribution of the number of turns, as shares of episodes."""
    shown = _of_one_kind(report)
    counts = [Counter(len(e.trajectory.turns) for e in result.seen) for _, result in shown]

    def draw(axes: Axes) -> None:
        from matplotlib.ticker import MaxNLocator

        colours, width = _colours(report), 0.8 / len(shown)
        for index, ((label, result), found) in enumerate(zip(shown, counts, strict=True)):
            places = [count + width * (index - (len(shown) - 1) / 2) for count in found]
            axes.bar(places, [n / result.episodes for n in found.values()], width, color=colours[label], label=label)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("turns", color=MUTED)
        axes.grid(False, axis="x")
        _shares(axes.yaxis)
        _legend(axes)

    return draw_svg("turns", 3.0, draw)


def tokens(report: ModelsReport) -> str | None:
    """Plot the cumulative distribution of sampled tokens per episode; None if the tokens are not known."""
    counted = [
        (label, sorted(known(episode_tokens(e.trajectory) for e in result.seen)))
        for label, result in _of_one_kind(report)
    ]
    found = [(label, values) for label, values in counted if values]
    if not found:
        return None
    last = max(values[-1] for _, values in found) * 1.03 + 1

    def draw(axes: Axes) -> None:
        colours = _colours(report)
        for label, values in found:
            shares = [(place + 1) / len(values) for place in range(len(values))]
            places = [values[0], *values, last]
            axes.step(places, [0, *shares, 1], where="post", color=colours[label], label=label, linewidth=2)
        axes.set_xlabel("sampled tokens", color=MUTED)
        axes.set_ylim(0, 1.02)
        axes.set_xlim(right=last)
        _shares(axes.yaxis)
        _legend(axes)

    return draw_svg("tokens", 3.0, draw)


def tools(report: ModelsReport) -> str | None:
    """Plot the calls per episode of the most used tools; None if there are no calls."""
    shown = _of_one_kind(report)[:4]
    calls = [{tool.name: tool.calls_per_episode for tool in result.tools} for _, result in shown]
    names = sorted({key for each in calls for key in each}, key=lambda key: (-max(e.get(key, 0) for e in calls), key))
    if not names:
        return None
    names = names[:NAMED]

    def draw(axes: Axes) -> None:
        colours, height = _colours(report), 0.75 / len(shown)
        for index, ((label, _), each) in enumerate(zip(shown, calls, strict=True)):
            places = [place + height * (index - (len(shown) - 1) / 2) for place in range(len(names))]
            axes.barh(places, [each.get(key, 0) for key in names], height, color=colours[label], label=label)
        _categories(axes, [name(key) for key in names])
        _legend(axes)

    return draw_svg("tools", 1.0 + (0.2 + 0.09 * len(shown)) * len(names), draw)


def fields(report: ModelsReport) -> str | None:
    """Plot the accuracy of every field, and format, with intervals; None if the family measures no fields."""
    shown = _of_one_kind(report)[:4]
    names = list(dict.fromkeys(key for _, result in shown for key in result.measures.fields))[:NAMED]
    if not names:
        return None

    def draw(axes: Axes) -> None:
        colours = _colours(report)
        for index, (label, result) in enumerate(shown):
            rates = _rates(result)
            for place, key in enumerate(["format", "all fields", *names]):
                if (rate := rates.get(key)) is not None:
                    y = place + 0.18 * (index - (len(shown) - 1) / 2)
                    axes.plot([rate.low, rate.high], [y, y], color=colours[label], linewidth=1.6)
                    axes.plot(rate.value, y, "o", color=colours[label], markersize=5, label=None if place else label)
        _categories(axes, ["format", "all fields", *map(name, names)])
        _shares(axes.xaxis)
        axes.set_xlim(0, 1.02)
        _legend(axes)

    return draw_svg("fields", 1.3 + 0.36 * len(names), draw)


# -- drawing ---------------------------------------------------------------------------------------------------------


def _of_one_kind(report: ModelsReport) -> list[tuple[str, ModelResult]]:
    """Return the greedy results of every model, or the sampled ones if the evaluated model has no greedy results."""
    kind = next(kind for kind in KINDS if kind in report.main.results)
    return [(name(m.label), m.results[kind]) for m in report.models if kind in m.results][:NAMED]


def _rates(result: ModelResult) -> dict[str, Rate | None]:
    found = result.measures
    return {"format": found.format, "all fields": result.success, **found.fields}


def _colours(report: ModelsReport) -> dict[str, str]:
    """Return the colour of each model by its shown name; the evaluated model is blue."""
    return {name(model.label): SERIES[i % len(SERIES)] for i, model in enumerate(report.models)}


def _interval(axes: Axes, rate: Rate, place: float) -> None:
    axes.plot([rate.low, rate.high], [place, place], color=INK, linewidth=1.6, solid_capstyle="butt")
    axes.plot([rate.low, rate.high], [place, place], "|", color=INK, markersize=8, markeredgewidth=1.6)


def _strip(axes: Axes, place: float, values: Sequence[float], colour: str, rng: random.Random) -> None:
    """Plot every value as a point, and a box plot over the points."""
    if not values:
        return
    shown = list(values) if len(values) <= POINTS else rng.sample(list(values), POINTS)
    xs = [place + rng.uniform(-0.28, 0.28) for _ in shown]
    axes.plot(xs, shown, "o", color=colour, markersize=3.2, alpha=0.35, markeredgewidth=0)
    line: Any = {"color": INK, "linewidth": 1.1}
    axes.boxplot(
        [values], positions=[place], widths=0.62, showfliers=False, manage_ticks=False, boxprops=line,
        whiskerprops=line, capprops=line, medianprops={**line, "linewidth": 2},
    )  # fmt: skip


def _categories(axes: Axes, labels: Sequence[str]) -> None:
    """Put the names at the left, the first one on top."""
    axes.set_yticks(range(len(labels)), [_short(label) for label in labels])
    axes.set_ylim(len(labels) - 0.45, -0.55)
    axes.grid(False, axis="y")
    axes.tick_params(axis="y", length=0)


def _short(label: str, limit: int = 22) -> str:
    return label if len(label) <= limit else f"{label[: limit // 2 - 1]}…{label[-limit // 2 :]}"


def _shares(axis: Any) -> None:
    from matplotlib.ticker import PercentFormatter

    axis.set_major_formatter(PercentFormatter(1.0, decimals=0))


def _legend(axes: Axes) -> None:
    """Put the legend below the plot, from the left edge of the figure, because the names at the left can take half of
    its width."""
    handles, labels = axes.get_legend_handles_labels()
    if len(labels) > 1:
        columns = 3 if max(map(len, labels)) < 12 else 2
        axes.figure.legend(handles, [_short(label) for label in labels], loc="outside lower left", ncols=columns)


_STYLE: Any = {
    **STYLE,
    "text.color": INK,
    "axes.edgecolor": RULE,
    "grid.color": RULE,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "ytick.labelcolor": INK,
    "legend.labelcolor": INK,
}


def draw_svg(title: str, height: float, draw: Callable[[Axes], None]) -> str:
    """Return an `<svg>` element without a background, whose ids are unique on the page."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        draw(figure.subplots())
        svg = to_svg(figure, title)
    svg = re.sub(
        r'<svg [^>]*?viewBox="([^"]*)"[^>]*>', rf'<svg viewBox="\1" role="img" aria-label="{title}">', svg, count=1
    )
    variables = {INK: "ink", MUTED: "muted", RULE: "rule", **{colour: key for key, colour in COLOURS.items()}}
    return re.sub("|".join(variables), lambda found: f"var(--{variables[found[0]]})", svg)
