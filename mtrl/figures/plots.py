"""curves.png: the main curves of a run in one figure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtrl.figures.style import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    RED,
    STOPS,
    STYLE,
    moving_average,
    not_measured,
    stack_shares,
    unit_scale,
    whole_ticks,
)
from mtrl.utils.files import replace_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Rows = Sequence[Mapping[str, Any]]

STOP = "rollout/stop/"


def draw_curves(rows: Rows, path: Path, title: str) -> None:
    """Draw the rows of metrics.jsonl into the PNG `path`, whole or not at all."""
    figure = curves_figure(rows, title)
    replace_file(Path(path), lambda part: figure.savefig(part, format="png", dpi=140))


def curves_figure(rows: Rows, title: str) -> Figure:
    """Return a figure of eight panels over the training steps (`PANELS`, in two rows of four)."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(17, 7.8), layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1))
        figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
        figure.text(
            0.99,
            0.985,
            "by training step; faint: as measured, strong: moving average",
            color=GREY,
            ha="right",
            va="top",
        )
        for axes, draw in zip(figure.subplots(2, 4).flat, PANELS, strict=True):
            draw(axes, rows)
            _finish(axes, rows)
    return figure


# -- the panels ------------------------------------------------------------------------------------------------------


def _held_out(axes: Axes, rows: Rows) -> None:
    axes.set_title("held out: success and reward")
    _marks(axes, rows, "val/reward/mean", "reward", BLUE, marker="s", markersize=9)
    _marks(axes, rows, "val/claims/mean", "claims of the reward", ORANGE, marker="v")
    sampled = {"marker": "D", "markerfacecolor": "white"}
    _marks(axes, rows, "val/success/sampled", "success, sampled", GREEN, **sampled)
    _marks(axes, rows, "val/success/mean", "success, greedy", GREEN, marker="o", yerr=_interval(rows))
    unit_scale(axes)


def _training(axes: Axes, rows: Rows) -> None:
    axes.set_title("training: success and reward")
    _line(axes, rows, "rollout/reward/mean", "reward", BLUE, linewidth=3.5)  # still seen below an equal success
    _line(axes, rows, "rollout/success/mean", "success", GREEN)
    _line(axes, rows, "rollout/claims/mean", "claims of the reward", ORANGE, linestyle="--")
    _line(axes, rows, "rollout/lenient_frac", "claimed, not solved", RED, linestyle=":")
    unit_scale(axes)


def _stops(axes: Axes, rows: Rows) -> None:
    axes.set_title("how episodes end")
    known = [row for row in rows if any(key.startswith(STOP) for key in row)]
    names = {key.removeprefix(STOP) for row in known for key in row if key.startswith(STOP)}
    order = [*(name for name in STOPS if name in names), *sorted(names - STOPS.keys())]
    parts = {name: [row.get(STOP + name) or 0.0 for row in known] for name in order}
    if any(map(any, parts.values())):
        stack_shares(axes, [row["step"] for row in known], parts, STOPS)


def _signal(axes: Axes, rows: Rows) -> None:
    axes.set_title("groups without a signal")
    _line(axes, rows, "analysis/zero_adv_groups", "zero-advantage groups", ORANGE)
    _from_zero(axes)


def _length(axes: Axes, rows: Rows) -> None:
    axes.set_title("length of an episode")
    _line(axes, rows, "rollout/turns/mean", "turns, mean", PURPLE)
    _line(_right(axes), rows, "rollout/tokens/response_max", "longest response, tokens (right)", GREY)


def _entropy(axes: Axes, rows: Rows) -> None:
    axes.set_title("entropy of the policy")
    _line(axes, rows, "train/entropy", "nats per token", PURPLE)
    _from_zero(axes)


def _drift(axes: Axes, rows: Rows) -> None:
    axes.set_title("drift of log-probs, engine to trainer")
    _line(axes, rows, "analysis/logprob_drift/max", "largest", RED, log=True)
    _line(axes, rows, "analysis/logprob_drift/mean", "mean", GREY, log=True)


def _speed(axes: Axes, rows: Rows) -> None:
    axes.set_title("speed")
    _line(axes, rows, "perf/tokens_per_second", "tokens per second", BLUE)
    _from_zero(axes)
    right = _right(axes)
    _line(right, rows, "time/step", "seconds per step (right)", GREY)
    _from_zero(right)


PANELS = (_held_out, _training, _stops, _length, _signal, _entropy, _drift, _speed)


# -- drawing ---------------------------------------------------------------------------------------------------------


def _points(rows: Rows, key: str, positive: bool = False) -> tuple[list[float], list[float]]:
    """Return the steps and values of the rows whose `key` is finite. With `positive`, only values above 0 (for a log
    axis)."""
    found = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
    found = [(step, value) for step, value in found if math.isfinite(value) and (value > 0 or not positive)]
    return [step for step, _ in found], [value for _, value in found]


def _line(axes: Axes, rows: Rows, key: str, label: str, colour: str, log: bool = False, **look: Any) -> None:
    """Draw a metric of the training steps. Once there are enough steps, the measured values are faint and their moving
    average is strong."""
    steps, values = _points(rows, key, positive=log)
    if not values:
        return
    smooth = moving_average(values)
    if smooth is not values:
        axes.plot(steps, values, color=colour, alpha=0.25, linewidth=1)
    usual: dict[str, Any] = {"linewidth": 1.8, "marker": "." if len(values) == 1 else None}
    axes.plot(steps, smooth, color=colour, label=label, **(usual | look))
    if log:
        axes.set_yscale("log")


def _marks(axes: Axes, rows: Rows, key: str, label: str, colour: str, **style: Any) -> None:
    """Draw a metric of the evaluations with one mark per evaluation."""
    steps, values = _points(rows, key)
    if values:
        look: Any = {"markersize": 6, "linestyle": ":", "linewidth": 1, "capsize": 3, "zorder": 3} | style
        axes.errorbar(steps, values, label=label, color=colour, **look)


def _interval(rows: Rows) -> list[list[float]] | None:
    """Return the distances from each mark of greedy success to the lower and the upper end of its confidence interval;
    None if the interval is not known."""
    middles, lows, highs = (_points(rows, f"val/success/{name}")[1] for name in ("mean", "ci_low", "ci_high"))
    if not len(middles) == len(lows) == len(highs):
        return None
    below = [max(0.0, middle - low) for middle, low in zip(middles, lows, strict=True)]
    above = [max(0.0, high - middle) for middle, high in zip(middles, highs, strict=True)]
    return [below, above]


def _from_zero(axes: Axes) -> None:
    axes.set_ylim(0, 1.05 * axes.get_ylim()[1])


def _right(axes: Axes) -> Axes:
    """Return axes with a second scale at the right and without a second grid."""
    right = axes.twinx()
    right.grid(False)
    right.spines["right"].set_visible(True)
    return right


def _finish(axes: Axes, rows: Rows) -> None:
    """Give the panel the common range of steps and one legend for both scales, or a note if it has no data."""
    scales = sorted(axes.get_shared_x_axes().get_siblings(axes), key=axes.figure.axes.index)
    named = [pair for scale in scales for pair in zip(*scale.get_legend_handles_labels(), strict=True)]
    if not named:
        for scale in scales:
            scale.set(xticks=[], yticks=[])
        not_measured(axes)
        return
    last = max(row["step"] for row in rows)
    axes.set_xlim(-0.02 * max(last, 1), 1.02 * max(last, 1))
    whole_ticks(axes)
    handles, labels = zip(*named, strict=True)
    axes.legend(handles, labels, loc="upper center", bbox_to_anchor=(0.5, -0.09), ncols=2, columnspacing=1.2)
