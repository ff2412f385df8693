"""Input and output of every figure: a study, and a drawing with its caption."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mtrl.figures.axis import Axis, Places, places
from mtrl.figures.groups import Group

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Study:
    """Groups to be compared, and the axis of their curves."""

    groups: Sequence[Group]
    axis: Axis = Axis.STEPS

    def places(self, group: Group) -> Places:
        return places(group, self.axis)

    @property
    def most_seeds(self) -> int:
        return max(group.seeds for group in self.groups)


@dataclass(frozen=True)
class Drawing:
    """A figure and its caption."""

    figure: Figure
    caption: str
