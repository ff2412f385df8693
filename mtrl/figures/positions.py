"""Figures by the position of a turn in its episode: rewards, advantages and actions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mtrl.figures.axis import Study
from mtrl.figures.curves import per_group
from mtrl.figures.groups import SeedGroup
from mtrl.figures.style import BLUE, GREY, Drawing, colour_of, label_of
from mtrl.figures.summaries import TURNS, ByTurn, by_turn, quantiles

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROWS = 14
"""Maximum number of metrics that are shown."""


def turn_rewards(study: Study) -> Drawing:
    """Draw the rewards of turns by position and by component, with one panel per group."""
    names = sorted({name for group in study.groups for name in _parts(group).names})

    def draw(axes: Axes, group: SeedGroup) -> bool:
        found = _parts(group)
        if found.counts:
            places = list(range(1, len(found.counts) + 1))
            for name, values in zip(found.names, found.per_turn, strict=True):
                look: Any = {"marker": "o", "markersize": 2.5, **colour_of(names.index(name))}
                axes.plot(places, values, label=label_of(name), **look)
            whole = by_turn(group.episodes.of("train"), lambda turn: {"reward": turn.reward})
            look = {"color": "black", "marker": "D", "markersize": 3, "linewidth": 1, "linestyle": (0, (3, 2))}
            axes.plot(places, whole.means[0], label="whole reward", **look)
            axes.axhline(0, color=GREY, linewidth=0.8)
            _place_ticks(axes, found.counts)
        return bool(found.counts)

    return Drawing(
        per_group(study, draw, "turn of the episode", "mean reward per turn"),
        "Reward of a turn, by its position in the episode: means over the stored training episodes that have this turn "
        "(n of them). Coloured: parts of the reward as reported, before the weights of reward.components. Dashed: the "
        f"whole reward.{_notes(study)}",
    )


def advantages(study: Study) -> Drawing:
    """Draw the advantages of trained turns by position, with one panel per group."""

    def draw(axes: Axes, group: SeedGroup) -> bool:
        credited = [
            (place, turn.advantage)
            for episode in group.episodes.of("train")
            for place, turn in enumerate(episode.turns[:TURNS], 1)
            if turn.advantage is not None
        ]
        found = quantiles(credited)
        if found:
            boxes = [
                {"whislo": row[0], "q1": row[1], "med": row[2], "q3": row[3], "whishi": row[4]} for row in found.values
            ]
            look: Any = {
                "boxprops": {"facecolor": BLUE, "alpha": 0.35},
                "medianprops": {"color": "black"},
                "patch_artist": True,
            }
            axes.bxp(boxes, positions=found.places, widths=0.6, showfliers=False, manage_ticks=False, **look)
            means = [float(np.mean([value for place, value in credited if place == p])) for p in found.places]
            axes.plot(found.places, means, "D", color="black", markersize=3, label="mean")
            axes.axhline(0, color=GREY, linewidth=0.8)
            _place_ticks(axes, found.counts)
        return bool(found)

    return Drawing(
        per_group(study, draw, "turn of the episode", "advantage"),
        "Advantages by the place of the turn in its episode, stored training episodes: median, middle 50 % and 90 %, "
        f"and mean. Turns that were never trained on are left out.{_notes(study)}",
    )


def actions(study: Study) -> Drawing:
    """Draw the counts of the environment per turn by position, such as tool calls and mistakes, with one panel per
    group."""
    tables = {group.label: by_turn(group.episodes.of("train"), lambda turn: turn.metrics) for group in study.groups}
    names = counted(list(tables.values()))
    largest = max(
        (float(np.nanmax(np.abs(table.rows(names)))) for table in tables.values() if table.has(names)), default=0
    )

    def draw(axes: Axes, group: SeedGroup) -> bool:
        table = tables[group.label]
        if table.has(names):
            _table(axes, names, table.rows(names), largest)
        return table.has(names)

    return Drawing(
        per_group(study, draw, "turn of the episode", "", height=1.1 + 0.17 * max(len(names), 2)),
        "What turns did, by their place in the episode: means of what the environment counts in a turn, over the turns "
        "that report it; calls of a tool by its name. Stored training episodes; shades go with the square root of "
        f"the mean.{_notes(study)}",
    )


def counted(tables: Sequence[ByTurn]) -> list[str]:
    """Return the `ROWS` largest metrics of all groups, without metrics that are always 0 or belong to single answer
    fields."""
    size: dict[str, float] = {}
    for table in tables:
        for name, row in zip(table.names, table.means, strict=True):
            size[name] = max(size.get(name, 0.0), float(np.nanmax(np.abs(row))))
    shown = [name for name in size if size[name] > 0 and "/" not in name]
    return sorted(sorted(shown, key=lambda name: (-size[name], name))[:ROWS])


def _parts(group: SeedGroup) -> ByTurn:
    return by_turn(group.episodes.of("train"), lambda turn: turn.components)


def _place_ticks(axes: Axes, counts: Sequence[int]) -> None:
    """Label the positions with the numbers of their turns."""
    stride = math.ceil(len(counts) / 10)
    shown = range(0, len(counts), stride)
    axes.set_xticks([place + 1 for place in shown], [f"{place + 1}\nn={_count(counts[place])}" for place in shown])
    axes.tick_params(axis="x", labelsize=6.5)
    axes.grid(False, axis="x")


def _count(value: int) -> str:
    return str(value) if value < 10_000 else f"{value / 1000:.0f}k"


def _table(axes: Axes, names: Sequence[str], means: np.ndarray, largest: float) -> None:
    """Draw means as a table. Cells are shaded by the square root of the mean, so that small values are visible."""
    places = means.shape[1]
    axes.imshow(np.sqrt(np.nan_to_num(np.abs(means)) / largest), cmap="Blues", vmin=0, vmax=1.6, aspect="auto")
    for (row, column), value in np.ndenumerate(means):
        if not math.isnan(value) and places <= 12:
            axes.text(column, row, _short(value), ha="center", va="center", fontsize=6.5)
    axes.set_yticks(range(len(names)), [label_of(name)[:28] for name in names])
    stride = math.ceil(places / 12)
    axes.set_xticks(range(0, places, stride), list(map(str, range(1, places + 1, stride))))
    axes.grid(False)
    axes.tick_params(length=0)


def _short(value: float) -> str:
    if 0 < abs(value) < 0.005:
        return "<.01" if value > 0 else "-<.01"
    return f"{value:.2f}" if value else "·"


def _notes(study: Study) -> str:
    longest = max((len(e.turns) for group in study.groups for e in group.episodes.of("train")), default=0)
    late = f" Turns after the {TURNS}th are left out." if longest > TURNS else ""
    return late + "".join(dict.fromkeys(group.episodes.note for group in study.groups))
