"""Figures of the shape of episodes: stop reasons and lengths."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from mtrl.figures.axis import Axis, Study
from mtrl.figures.bands import keys_below, seed_band
from mtrl.figures.curves import along, per_group, same_scale
from mtrl.figures.episodes import StoredEpisode
from mtrl.figures.groups import SeedGroup
from mtrl.figures.style import (
    BLUE,
    COLUMN,
    ORANGE,
    RED,
    STOPS,
    Drawing,
    not_measured,
    panels,
    row_title,
    shared_legend,
    stack_shares,
)
from mtrl.figures.summaries import Quantiles, quantiles

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STOP = "rollout/stop/"

Lengths = Callable[[StoredEpisode], Iterable[float]]
"""Returns the values that an episode adds to a distribution."""


def stops(study: Study) -> Drawing:
    """Draw the stop reasons of training episodes over time, stacked, with one panel per group."""

    def draw(axes: Axes, group: SeedGroup) -> bool:
        steps, parts = stop_shares(group)
        if steps:
            stack_shares(axes, study.places(group).of(steps), parts, STOPS)
            along(axes, study)
        return bool(steps)

    several = " Means over seeds." if study.most_seeds > 1 else ""
    return Drawing(
        per_group(study, draw, "", "share of episodes"),
        f"How training episodes ended, by step; reasons that never occurred are left out.{several}",
    )


def stop_shares(group: SeedGroup) -> tuple[list[int], dict[str, list[float]]]:
    """Return the steps, and for each stop reason its shares at those steps as means over seeds. Reasons are in their
    usual order."""
    known = [STOP + name for name in STOPS]
    keys = keys_below(group, STOP)
    bands = {key: seed_band(group, key) for key in [*known, *keys] if key in keys}
    steps = sorted({step for found in bands.values() for step in found.steps})
    shares = {key: dict(zip(found.steps, found.mean, strict=True)) for key, found in bands.items()}
    return steps, {key.removeprefix(STOP): [by_step.get(s, 0.0) for s in steps] for key, by_step in shares.items()}


def lengths(study: Study) -> Drawing:
    """Draw the distributions of turns and tokens over time, with one row of three panels per group."""
    figure, grid = panels(len(study.groups), len(LENGTHS), 1.9, width=2 * COLUMN / 3)
    for row, group in zip(grid, study.groups, strict=True):
        row_title(row[0], group.label)
        for axes, (name, metric, of, limit) in zip(row, LENGTHS, strict=True):
            axes.set_ylabel(name)
            drawn = _quantile_bands(axes, study, group, of)
            found = seed_band(group, metric)
            if found:
                x = study.places(group).of(found.steps)
                axes.plot(x, found.mean, color=ORANGE, linewidth=1, label="mean of every step")
            along(axes, study)
            if drawn or found:
                _limit(axes, group.setting(limit))
                axes.set_ylim(bottom=0)
            else:
                not_measured(axes)
    for column in zip(*grid, strict=True):
        same_scale([axes for axes in column if axes.lines or axes.collections])
    shared_legend(figure, [axes for row in grid for axes in row])
    note = "".join(dict.fromkeys(group.episodes.note for group in study.groups))
    return Drawing(
        figure,
        "Length of training episodes: turns, tokens sampled in a turn, tokens of the conversation at its end. Bands: "
        "middle 50 % and 90 % of the stored episodes of a step (all seeds) and their median; orange: mean of every "
        f"step; dashed: the limit, where there is one in sight.{note}",
    )


LENGTHS: tuple[tuple[str, str, Lengths, str], ...] = (
    ("turns per episode", "rollout/turns/mean", lambda e: [len(e.turns)], "generator.max_turns"),
    (
        "tokens per turn",
        "rollout/tokens/response_mean",
        lambda e: [turn.tokens for turn in e.turns],
        "generator.sampling_params.max_generate_length",
    ),
    ("context (tokens)", "rollout/context/mean", lambda e: [e.context], "generator.max_context_length"),
)
"""Panels: title, metric of the mean, values of an episode, setting of the limit."""


def _quantile_bands(axes: Axes, study: Study, group: SeedGroup, of: Lengths) -> bool:
    known = study.places(group).by_step
    # A step without a row, as of a live run, has a position on the axis of steps only.
    found = quantiles(
        (episode.step, value)
        for episode in group.episodes.of("train")
        if study.axis is Axis.STEPS or episode.step in known
        for value in of(episode)
    )
    if found:
        _bands(axes, [known.get(step, float(step)) for step in found.places], found)
    return bool(found)


def _bands(axes: Axes, x: list[float], found: Quantiles) -> None:
    """Draw nested bands; a single step is drawn as a bar."""
    values = found.values
    if len(x) == 1:
        x, values = [x[0] - 0.4, x[0] + 0.4], values.repeat(2, axis=0)
    axes.fill_between(x, values[:, 0], values[:, 4], color=BLUE, alpha=0.15, linewidth=0, label="middle 90 %")
    axes.fill_between(x, values[:, 1], values[:, 3], color=BLUE, alpha=0.3, linewidth=0, label="middle 50 %")
    axes.plot(x, values[:, 2], color="black", linewidth=0.9, marker=".", markersize=3, label="median", zorder=2.5)


def _limit(axes: Axes, limit: object) -> None:
    """Draw the limit, unless it is so far above the data that it would flatten the curves."""
    if isinstance(limit, int) and limit <= 2 * axes.get_ylim()[1]:
        axes.axhline(limit, color=RED, linewidth=0.9, linestyle=(0, (4, 2)), label="limit")
        axes.set_ylim(top=1.06 * max(limit, axes.get_ylim()[1] / 1.06))
