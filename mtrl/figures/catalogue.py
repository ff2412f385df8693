"""The figures, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mtrl.figures import learning, phases, positions, shapes, verdicts
from mtrl.figures.study import Drawing, Study
from mtrl.figures.style import PAPER


@dataclass(frozen=True)
class Entry:
    draw: Callable[[Study], Drawing]
    over_time: bool
    """Whether the figure uses the axis of the study."""


FIGURES = {
    "learning": Entry(learning.learning, True),
    "agreement": Entry(verdicts.agreement, True),
    "reward_vs_score": Entry(verdicts.reward_vs_score, False),
    "components": Entry(learning.components, True),
    "signal": Entry(learning.signal, True),
    "stops": Entry(shapes.stops, True),
    "lengths": Entry(shapes.lengths, True),
    "budgets": Entry(learning.budgets, True),
    "turn_rewards": Entry(positions.turn_rewards, False),
    "advantages": Entry(positions.advantages, False),
    "actions": Entry(positions.actions, False),
    "timeline": Entry(phases.timeline, False),
}
"""Figures by name, in the order of their display."""


def draw(name: str, study: Study) -> Drawing:
    """Draw a figure in the style `PAPER`, independent of the style of the process."""
    import matplotlib

    with matplotlib.rc_context(PAPER):
        return FIGURES[name].draw(study)
