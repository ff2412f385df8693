"""Drawing of a metric over the steps: a line for the mean of the seeds, a band for their spread."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mtrl.figures.axis import NAMES, Axis, Places, Study
from mtrl.figures.bands import Band
from mtrl.figures.groups import SeedGroup
from mtrl.figures.style import label_of, not_measured, panels, shared_legend, title, whole_ticks

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PLACE = "Seeds are aligned by step, and drawn at their mean position on the axis."
HOURS = "Hours do not count evaluations."
MARKS = 25
"""Maximum number of points of a line that has markers."""


def draw_band(axes: Axes, places: Places, band: Band, label: str, **look: Any) -> bool:
    """Draw the mean as a line, and lowest to highest seed as a band at steps that two or more seeds measured.

    Where some seeds are missing, as at the end of a partial run, the line is thin and dotted. Return whether there were
    data to draw.
    """
    if not band:
        return False
    x, label = places.of(band.steps), label_of(label)
    look = {"marker": "o" if len(x) <= MARKS else None, "markersize": 2.5} | look
    pieces = sorted(band.stretches(), key=lambda piece: not piece[2])  # the legend shows the style of a whole one
    for number, (first, last, whole) in enumerate(pieces):
        part = slice(first, last + 1)
        how = look if whole else {**look, "linestyle": ":", "linewidth": 0.8}
        axes.plot(x[part], band.mean[part], label=f"_{label}" if number else label, **how)
    several = [count > 1 for count in band.seeds]
    if any(several):
        axes.fill_between(x, band.low, band.high, where=several, color=look["color"], alpha=0.1, linewidth=0)
        for edge in (band.low, band.high):  # edges distinguish bands that overlap
            ends = [value if some else math.nan for value, some in zip(edge, several, strict=True)]
            axes.plot(x, ends, color=look["color"], alpha=0.5, linewidth=0.6, label=f"_edge of {label}")
    return True


def draw_mean(axes: Axes, places: Places, band: Band, label: str, **look: Any) -> bool:
    """Draw only the mean, for panels with several metrics, whose bands would hide each other."""
    if band:
        marker = "o" if len(band.steps) == 1 else None
        axes.plot(places.of(band.steps), band.mean, label=label, marker=marker, markersize=2.5, **look)
    return bool(band)


def per_group(
    study: Study, draw: Callable[[Axes, SeedGroup], bool], xlabel: str, ylabel: str, height: float = 2.1
) -> Figure:
    """Return a figure with one panel per group, on the same vertical scale, and one legend for all.

    Args:
        draw: Draws a group and returns whether there were data to draw.
    """
    count = len(study.groups)
    columns = min(2, count)
    figure, grid = panels(-(-count // columns), columns, height)
    flat = [axes for row in grid for axes in row]
    drawn = []
    for axes, group in zip(flat, study.groups, strict=False):
        title(axes, group.label)
        axes.set(xlabel=xlabel, ylabel=ylabel)
        if draw(axes, group):
            drawn.append(axes)
        else:
            not_measured(axes)
    for axes in flat[count:]:
        axes.remove()
    same_scale(drawn)
    shared_legend(figure, flat[:count])
    return figure


def same_scale(some: list[Axes]) -> None:
    """Set the same vertical limits for panels that are to be compared."""
    if some:
        limits = [axes.get_ylim() for axes in some]
        for axes in some:
            axes.set_ylim(min(low for low, _ in limits), max(high for _, high in limits))


def along(axes: Axes, study: Study) -> None:
    """Set the name and the ticks of the axis of a study."""
    axes.set_xlabel(NAMES[study.axis])
    if study.axis is Axis.STEPS:
        whole_ticks(axes)
    else:
        from matplotlib.ticker import EngFormatter, MaxNLocator

        axes.xaxis.set_major_locator(MaxNLocator(nbins=5))
        if study.axis is not Axis.HOURS:
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))


def seeds_of(group: SeedGroup) -> str:
    """Return the label of a group with the number of its runs."""
    different = len({str(run.seed) for run in group}) == group.seeds
    return f"{group.label} ({group.seeds} {'seeds' if different else 'runs'})" if group.seeds > 1 else group.label


def spread(study: Study) -> str:
    """Return the explanation of lines and bands for captions."""
    if study.most_seeds == 1:
        return "One run each." if study.axis is not Axis.HOURS else f"One run each. {HOURS}"
    counts = sorted({group.seeds for group in study.groups})
    many = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    place = "" if study.axis is Axis.STEPS else f" {PLACE}"
    return (
        f"Lines: mean over seeds (n = {many}); bands: lowest to highest seed; dotted: steps that only some seeds have."
        + place
        + (f" {HOURS}" if study.axis is Axis.HOURS else "")
    )
