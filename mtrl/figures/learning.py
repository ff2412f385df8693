"""Figures of learning: success, reward, and the learning signal of the groups."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mtrl.figures.axis import Study
from mtrl.figures.bands import keys_below, seed_band, window
from mtrl.figures.curves import along, draw_band, per_group, same_scale, seeds_of, spread
from mtrl.figures.groups import SeedGroup
from mtrl.figures.style import Drawing, colour_of, not_measured, panels, shared_legend, title, unit_scale

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Panel = tuple[str, str, str]
"""Title, metric and label of the vertical axis of a panel."""


def learning(study: Study) -> Drawing:
    """Draw held-out success, and success and reward of training, with one line per group."""
    figure = compared(
        study,
        [
            ("held out: success, greedy", "val/success/mean", "success rate"),
            ("held out: success, sampled", "val/success/sampled", "success rate"),
            ("training: success", "rollout/success/mean", "success rate"),
            ("training: reward", "rollout/reward/mean", "reward per episode"),
        ],
    )
    for axes in figure.axes[:3]:
        unit_scale(axes)
    bars = " Bars: 95 % interval over the held-out rows, where a group is one run." if _single(study) else ""
    return Drawing(
        figure,
        "Learning curves. Above: success by the scorer on held-out rows, greedy and sampled. Below: success by the "
        f"same scorer, and the reward, of training rollouts. {spread(study)}{bars}{smoothed(study)}",
    )


def signal(study: Study) -> Drawing:
    """Draw the learning signal: groups without an advantage, and the spread and means of rewards."""
    figure = compared(
        study,
        [
            ("groups without an advantage", "analysis/zero_adv_frac", "share of groups"),
            ("spread of the reward within a group", "analysis/group_reward_std", "standard deviation"),
            ("reward of all groups", "rollout/reward/mean", "reward per episode"),
            ("reward of groups with an advantage", "rollout/reward/valid_mean", "reward per episode"),
        ],
    )
    unit_scale(figure.axes[0])
    same_scale([axes for axes in figure.axes[2:4] if axes.lines])
    return Drawing(
        figure,
        "Signal. A group whose trajectories all earn the same has no advantage, and teaches nothing. When the reward "
        "of the groups with an advantage falls below that of all groups and learning stalls, the reward has lost its "
        f"variance. {spread(study)}{smoothed(study)}",
    )


def budgets(study: Study) -> Drawing:
    """Draw whether budgets let episodes finish: completion, and the shares that the limits cut."""
    figure = compared(
        study,
        [
            ("training: answered", "rollout/completion/mean", "share of episodes"),
            ("held out: answered", "val/completion/mean", "share of episodes"),
            ("training: a turn at the token limit", "rollout/tokens/at_cap_frac", "share of episodes"),
            ("training: out of turns", "rollout/stop/max_turns", "share of episodes"),
        ],
    )
    for axes, limit in zip(figure.axes[2:4], (0.05, 0.10), strict=True):
        if axes.lines:
            axes.axhline(limit, color="black", linewidth=0.8, linestyle=(0, (4, 2)), label=f"_limit {limit}")
            axes.set_ylim(bottom=0, top=max(axes.get_ylim()[1], 1.5 * limit))
    for axes in figure.axes[:2]:
        unit_scale(axes)
    return Drawing(
        figure,
        "Budgets. Above: episodes that came to their end, in training and held out. Below: training episodes with a "
        "turn at the limit of tokens per turn, and those that ran out of turns; dashed: the 5 % and 10 % from which on "
        f"a larger budget is worth trying. {spread(study)}{smoothed(study)}",
    )


def components(study: Study) -> Drawing:
    """Draw the components of the reward over time, with one panel per group."""
    prefix = "rollout/components/"
    names = sorted({key for group in study.groups for key in keys_below(group, prefix)})

    def draw(axes: Axes, group: SeedGroup) -> bool:
        places = study.places(group)
        drawn = [
            draw_band(axes, places, seed_band(group, name, True), name.removeprefix(prefix), **colour_of(number))
            for number, name in enumerate(names)
        ]
        total = seed_band(group, "rollout/reward/mean", True)
        if total and any(drawn):
            look: Any = {"color": "black", "linewidth": 1, "linestyle": (0, (3, 2)), "zorder": 3}
            axes.plot(places.of(total.steps), total.mean, label="whole reward", **look)
        along(axes, study)
        return any(drawn)

    return Drawing(
        per_group(study, draw, "", "reward per episode"),
        "Parts of the reward, as they were reported, before the weights of reward.components: means over the training "
        f"episodes of a step; dashed: the whole reward. {spread(study)}{smoothed(study)}",
    )


def compared(study: Study, some: list[Panel], height: float = 1.95) -> Figure:
    """Return a figure with panels of metrics, two per row, each with one line per group."""
    figure, grid = panels(-(-len(some) // 2), 2, height)
    flat = [axes for row in grid for axes in row]
    for axes, (name, metric, label) in zip(flat, some, strict=True):
        title(axes, name)
        axes.set_ylabel(label)
        drawn = [_draw(axes, study, group, metric, number) for number, group in enumerate(study.groups)]
        along(axes, study)
        if not any(drawn):
            not_measured(axes)
    shared_legend(figure, flat)
    return figure


def _draw(axes: Axes, study: Study, group: SeedGroup, metric: str, number: int) -> bool:
    places, look = study.places(group), colour_of(number)
    is_training = not metric.startswith("val/")
    drawn = draw_band(axes, places, seed_band(group, metric, smooth=is_training), seeds_of(group), **look)
    if metric == "val/success/mean" and group.seeds == 1:
        _interval(axes, study, group, look["color"])
    return drawn


def _interval(axes: Axes, study: Study, group: SeedGroup, colour: str) -> None:
    """Draw the confidence interval of every evaluation of a single run."""
    low, middle, high = (group.runs[0].series(f"val/success/{name}") for name in ("ci_low", "mean", "ci_high"))
    steps = sorted(low.keys() & middle.keys() & high.keys())
    if steps:
        below = [max(0.0, middle[step] - low[step]) for step in steps]
        above = [max(0.0, high[step] - middle[step]) for step in steps]
        where = study.places(group).of(steps)
        axes.errorbar(
            where, [middle[s] for s in steps], [below, above], fmt="none", ecolor=colour, capsize=2, elinewidth=0.8
        )


def _single(study: Study) -> bool:
    return any(group.seeds == 1 for group in study.groups)


def smoothed(study: Study) -> str:
    """Return the sentence for captions about the moving average of training metrics."""
    widths = sorted({window(group, "rollout/reward/mean") for group in study.groups} - {1})
    if not widths:
        return ""
    steps = " or ".join(map(str, widths))
    return f" Training metrics are moving averages over {steps} steps."
