"""Figures that compare reward and scorer: where they differ, the reward does not mean success."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from mtrl.figures.axis import Study
from mtrl.figures.bands import Band, band, seed_band
from mtrl.figures.curves import along, draw_mean, per_group
from mtrl.figures.episodes import StoredEpisode
from mtrl.figures.groups import SeedGroup
from mtrl.figures.learning import smoothed
from mtrl.figures.style import BLUE, GREEN, ORANGE, PURPLE, Drawing, unit_scale
from mtrl.figures.summaries import cells, shares
from mtrl.scoring.agreement import TrajectoryAgreement

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LOOKS = {TrajectoryAgreement.AGREE: BLUE, TrajectoryAgreement.LENIENT: ORANGE, TrajectoryAgreement.STRICT: PURPLE}
CORNERS = {
    (False, False): ("neither", BLUE),
    (True, True): ("both", BLUE),
    (True, False): ("lenient", ORANGE),
    (False, True): ("strict", PURPLE),
}
"""(claimed, succeeded) -> name and colour of the corner."""
NAMES = {
    TrajectoryAgreement.AGREE: "they agree",
    TrajectoryAgreement.LENIENT: "lenient: solved by the reward only",
    TrajectoryAgreement.STRICT: "strict: solved by the scorer only",
}
LARGEST = 260.0
"""Area of the circle of the most frequent pair, in points squared."""
SMALLEST = 5.0
FEW = 4
"""Maximum number of different scores for which each score has a tick."""


def reward_vs_score(study: Study) -> Drawing:
    """Draw stored training episodes by score and reward, with one panel per group."""

    def draw(axes: Axes, group: SeedGroup) -> bool:
        episodes = [episode for episode in group.episodes.of("train") if episode.score is not None]
        if episodes:
            _circles(axes, episodes)
            _quadrants(axes, group, episodes)
        return bool(episodes)

    note = "".join(dict.fromkeys(group.episodes.note for group in study.groups))
    return Drawing(
        per_group(study, draw, "score, by the scorer", "reward", height=2.6),
        "Reward against score of the stored training episodes. The area of a circle is the number of episodes; lines "
        "are the thresholds from which reward and scorer call an episode a success; where only one of them does, they "
        f"disagree.{note}",
    )


def agreement(study: Study) -> Drawing:
    """Draw reward, claims and success of training episodes over time on one axis, with one panel per group."""

    def draw(axes: Axes, group: SeedGroup) -> bool:
        places = study.places(group)
        claims, success = claims_of(group), success_of(group)
        reward = seed_band(group, "rollout/reward/mean", smooth=True)
        drawn = [
            draw_mean(axes, places, success, "success: solved", color=GREEN, linewidth=2),
            draw_mean(axes, places, claims, "claims: solved by the reward", color=ORANGE, linestyle=(0, (2.5, 1.5))),
            draw_mean(axes, places, reward, "reward", color=BLUE, linestyle=(0, (1, 1))),
        ]
        _gap(axes, study, claims, success, group)
        unit_scale(axes)
        along(axes, study)
        return any(drawn)

    return Drawing(
        per_group(study, draw, "", "share; reward"),
        "Reward, claims and success of training episodes, means over seeds. A claim is an episode whose reward says "
        "that it is solved; shaded: more claims than successes, as where a reward is exploited. For runs that "
        f"did not count claims, they are counted in the stored episodes.{smoothed(study)}",
    )


def claims_of(group: SeedGroup) -> Band:
    """Return the share of training episodes that the reward calls solved; of stored episodes if the run did not count
    claims."""
    found = seed_band(group, "rollout/claims/mean", smooth=True)
    return found or _stored(group, lambda episode: float(episode.claimed))


def success_of(group: SeedGroup) -> Band:
    found = seed_band(group, "rollout/success/mean", smooth=True)
    return found or _stored(group, lambda episode: float(episode.succeeded))


def _stored(group: SeedGroup, of: Callable[[StoredEpisode], float]) -> Band:
    """Return the means over the stored episodes, for the steps that have a row in `metrics.jsonl`: only these have a
    position on the axis. A live or killed run may have stored the trajectories of a step before its row."""
    known = {row["step"] for run in group for row in run.rows}
    by_run = [shares(episodes.of("train"), of) for episodes in group.episodes_by_run]
    return band([{step: mean for step, mean in means.items() if step in known} for means in by_run])


def _gap(axes: Axes, study: Study, claims: Band, success: Band, group: SeedGroup) -> None:
    """Shade the area where claims exceed successes."""
    solved = dict(zip(success.steps, success.mean, strict=True))
    both = [
        (step, claim, solved[step]) for step, claim in zip(claims.steps, claims.mean, strict=True) if step in solved
    ]
    if both:
        steps, above, below = zip(*both, strict=True)
        more = [claim > solved for _, claim, solved in both]
        x = study.places(group).of(list(steps))
        axes.fill_between(
            x, above, below, where=more, color=ORANGE, alpha=0.25, linewidth=0, label="claimed, not solved"
        )


def _circles(axes: Axes, episodes: Sequence[StoredEpisode]) -> None:
    found = cells(episodes)
    most = max(cell.count for cell in found)
    for verdict, colour in LOOKS.items():
        mine = [cell for cell in found if cell.verdict == verdict]
        axes.scatter(
            [cell.score for cell in mine],
            [cell.reward for cell in mine],
            [max(SMALLEST, LARGEST * cell.count / most) for cell in mine],
            color=colour,
            alpha=0.55,
            edgecolor=colour,
            linewidth=0.6,
            zorder=3,
        )
        axes.scatter([], [], 40, color=colour, alpha=0.55, label=NAMES[verdict])


def _quadrants(axes: Axes, group: SeedGroup, episodes: Sequence[StoredEpisode]) -> None:
    """Draw the thresholds, and the share of the episodes in each of the four corners between them."""
    limits = group.runs[0].thresholds
    scores = {round(episode.score or 0.0, 6) for episode in episodes}
    low, high = min(*scores, 0.0), max(*scores, limits.success)
    axes.set_xlim(low - 0.4 * (high - low), high + 0.4 * (high - low))
    bottom, top = axes.get_ylim()
    bottom, top = min(bottom, 0.0), max(top, limits.claim)
    axes.set_ylim(bottom - 0.15 * (top - bottom), top + 0.2 * (top - bottom))
    if len(scores) <= FEW:
        axes.set_xticks(sorted({*scores, limits.success}))
    axes.axvline(limits.success, color="black", linewidth=0.7, linestyle=(0, (4, 2)))
    axes.axhline(limits.claim, color="black", linewidth=0.7, linestyle=(0, (4, 2)))
    places = Counter((episode.claimed, episode.succeeded) for episode in episodes)
    for (claim, success), (name, colour) in CORNERS.items():
        words = f"{name} {places[claim, success] / len(episodes):.1%}"
        look: Any = {"color": colour, "fontsize": "small", "zorder": 4, "transform": axes.transAxes}
        axes.text(
            0.98 if success else 0.02,
            0.98 if claim else 0.02,
            words,
            ha="right" if success else "left",
            va="top" if claim else "bottom",
            **look,
        )
