"""Figure of the time: the activities of generator and trainer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from mtrl.figures.axis import Study
from mtrl.figures.spans import (
    IDLE,
    WAIT,
    TimelineSpan,
    Window,
    lanes,
    middle_steps,
    overlap,
    read_spans,
    shares,
    windows,
)
from mtrl.figures.style import (
    BLUE,
    COLUMN,
    GREEN,
    INDIGO,
    ORANGE,
    PALE,
    PURPLE,
    RED,
    SKY,
    YELLOW,
    Drawing,
    label_of,
    not_measured,
    panels,
    row_title,
    shared_legend,
    stack_shares,
    whole_ticks,
)
from mtrl.record.run import Run
from mtrl.record.timeline import rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {
    "generate": BLUE,
    "credit": PURPLE,
    "update": ORANGE,
    "sync": YELLOW,
    "evaluate": GREEN,
    "save": INDIGO,
    "rollout": SKY,
    WAIT: RED,
    IDLE: PALE,
}
TALL = 0.76
"""Height of a lane, in units of the distance between lanes; overlapping spans share it."""


def timeline(study: Study) -> Drawing:
    """Draw some steps in detail, and each lane's shares of time over the run, with one row per group that has a
    timeline."""
    runs = {group.label: next((run for run in group if run.spans), None) for group in study.groups}
    shown = {label: read_spans(run.spans) for label, run in runs.items() if run} or {study.groups[0].label: []}
    figure, grid = panels(len(shown), 3, 1.9, width=2 * COLUMN / 3)
    words = []
    for (gantt, *areas), (label, spans) in zip(grid, shown.items(), strict=True):
        found = windows(spans)
        row_title(gantt, _title(label, found))
        _gantt(gantt, spans)
        for axes, lane in zip(areas, ("generator", "trainer"), strict=True):
            axes.set_ylabel(f"{lane}: share")
            _shares(axes, found, lane)
        if found:
            words.append(f"{label}, {_in_words(found, lanes(spans))}{_speeds(runs[label])}")
    shared_legend(figure, [axes for row in grid for axes in row])
    missing = [label for label, run in runs.items() if not run]
    if missing:
        words.append(f"Not measured: {'; '.join(missing)}.")
    return Drawing(
        figure,
        "Where the time went, of one run of each group. Left: what generator and trainer did in some steps from the "
        f"middle of the run. Right: each one's shares of the time, step by step. {' '.join(words)}",
    )


def _title(label: str, found: Sequence[Window]) -> str:
    both = overlap(found)
    return f"{label}, {both:.0%} of the time side by side" if both >= 0.005 else label


def _gantt(axes: Axes, spans: Sequence[TimelineSpan]) -> None:
    """Draw one lane per actor and one bar per span, in seconds from the first of the shown steps.

    Spans of other steps that overlap this time are shown too, as when a step is generated while the previous one is
    trained. The number of a step is placed at the start of its first span.
    """
    steps = middle_steps(spans)
    shown = [span for span in spans if span.step in steps]
    if not shown:
        not_measured(axes)
        return
    zero, end = shown[0].start, max(span.end for span in shown)
    chosen = [span for span in spans if span.end > zero and span.start < end]
    names = lanes(spans)
    order = [*COLOURS, *sorted({span.name for span in chosen} - COLOURS.keys())]
    labelled: set[str] = set()
    for span, low, height in sorted(_placed(chosen, names), key=lambda bar: order.index(bar[0].name)):
        look: Any = {"facecolors": COLOURS.get(span.name, "black"), "edgecolor": "white", "linewidth": 0.4}
        label = None if span.name in labelled else label_of(span.name)
        labelled.add(span.name)
        axes.broken_barh([(span.start - zero, span.end - span.start)], (low, height), label=label, **look)
    for step in steps:
        first = min(span.start for span in shown if span.step == step)
        axes.text(first - zero, -0.44, f" {step}", fontsize=6.5, va="bottom")
    axes.set_yticks(range(len(names)), list(map(label_of, names)))
    axes.set(ylim=(len(names) - 0.5, -0.75), xlabel="seconds", xlim=(0, end - zero))
    axes.grid(False, axis="y")


def _placed(spans: Sequence[TimelineSpan], names: Sequence[str]) -> Iterator[tuple[TimelineSpan, float, float]]:
    """Yield each span with the lower edge and the height of its bar. Overlapping spans of a lane are in separate rows
    of it."""
    for place, lane in enumerate(names):
        own = [span for span in spans if span.lane == lane]
        found = rows([(span.start, span.end) for span in own])
        height = TALL / (max(found, default=0) + 1)
        for span, row in zip(own, found, strict=True):
            yield span, place - TALL / 2 + row * height, height


def _shares(axes: Axes, found: Sequence[Window], lane: str) -> None:
    by_step: dict[int, list[Window]] = {}
    for window in found:
        by_step.setdefault(window.step, []).append(window)
    table = {step: shares(some, lane) for step, some in sorted(by_step.items())}
    if not any(table.values()):
        not_measured(axes)
        return
    order = [*COLOURS, *sorted({name for row in table.values() for name in row} - COLOURS.keys())]
    parts = {name: [row.get(name, 0.0) for row in table.values()] for name in order}
    stack_shares(axes, list(table), parts, COLOURS, step="mid")
    axes.set_xlabel("training step")
    whole_ticks(axes)


def _in_words(found: Sequence[Window], names: Sequence[str]) -> str:
    total = sum(window.end - window.start for window in found)
    lines = []
    for lane in names:
        used = sorted(shares(found, lane).items(), key=lambda item: -item[1])
        lines.append(f"{lane} " + ", ".join(f"{name} {share:.0%}" for name, share in used if share >= 0.005))
    return f"{total:,.0f} s: {'; '.join(lines)}; both at once {overlap(found):.0%}."


SPEEDS = {
    "perf/rollout_tokens_per_second": "{:,.0f} tokens/s sampled",
    "perf/update_tokens_per_second": "{:,.0f} tokens/s trained",
    "perf/mfu": "MFU of the update {:.1%}",
}


def _speeds(run: Run | None) -> str:
    """Return a sentence with the measured speeds of the median step."""
    series = {words: list(run.series(key).values()) for key, words in SPEEDS.items()} if run else {}
    speeds = [words.format(median(values)) for words, values in series.items() if values]
    return f" In the median step: {', '.join(speeds)}." if speeds else ""
