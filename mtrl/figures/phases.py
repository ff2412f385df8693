"""Figure of the time: what generator and trainer did when."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mtrl.figures.spans import IDLE, Span, Window, lanes, middle_steps, overlap, read_spans, shares, windows
from mtrl.figures.study import Drawing, Study
from mtrl.figures.style import (
    BLUE,
    COLUMN,
    GREEN,
    INDIGO,
    ORANGE,
    PALE,
    PURPLE,
    YELLOW,
    not_measured,
    panels,
    row_title,
    shared_legend,
    stack_shares,
    whole_ticks,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {
    "generate": BLUE,
    "credit": PURPLE,
    "update": ORANGE,
    "sync": YELLOW,
    "evaluate": GREEN,
    "save": INDIGO,
    IDLE: PALE,
}


def timeline(study: Study) -> Drawing:
    """Some steps in detail, and each lane's share of time over the run: a row for each group that has a timeline."""
    runs = {group.label: next((run for run in group if run.spans), None) for group in study.groups}
    shown = {label: read_spans(run.spans) for label, run in runs.items() if run} or {study.groups[0].label: []}
    figure, grid = panels(len(shown), 3, 1.9, width=2 * COLUMN / 3)
    words = []
    for (gantt, *areas), (label, spans) in zip(grid, shown.items(), strict=True):
        found = windows(spans)
        row_title(gantt, label)
        _gantt(gantt, spans)
        for axes, lane in zip(areas, ("generator", "trainer"), strict=True):
            axes.set_ylabel(f"{lane}: share")
            _shares(axes, found, lane)
        if found:
            words.append(f"{label}, {_in_words(found, lanes(spans))}")
    shared_legend(figure, [axes for row in grid for axes in row])
    missing = [label for label, run in runs.items() if not run]
    if missing:
        words.append(f"Not measured: {'; '.join(missing)}.")
    return Drawing(
        figure,
        "Where the time went, of one run of each group. Left: what generator and trainer did in some steps from the "
        f"middle of the run. Right: each one's shares of the time, step by step. {' '.join(words)}",
    )


def _gantt(axes: Axes, spans: Sequence[Span]) -> None:
    """A lane for each actor, a bar for each span, in seconds from the first of the shown steps."""
    steps = middle_steps(spans)
    chosen = [span for span in spans if span.step in steps]
    if not chosen:
        not_measured(axes)
        return
    zero = chosen[0].start
    names = lanes(spans)
    for name in dict.fromkeys([*COLOURS, *(span.name for span in chosen)]):
        bars = [span for span in chosen if span.name == name]
        for row, lane in enumerate(names):
            pieces = [(span.start - zero, span.end - span.start) for span in bars if span.lane == lane]
            if pieces:
                look: Any = {"facecolors": COLOURS.get(name, "black"), "edgecolor": "white", "linewidth": 0.4}
                axes.broken_barh(pieces, (row - 0.36, 0.72), label=name, **look)
    for span in chosen:
        if span.name == "generate":
            axes.text(span.start - zero, -0.44, f" {span.step}", fontsize=6.5, va="bottom")
    axes.set_yticks(range(len(names)), names)
    axes.set(ylim=(len(names) - 0.5, -0.75), xlabel="seconds", xlim=(0, None))
    axes.grid(False, axis="y")


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
