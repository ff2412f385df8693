"""The result of a move."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Outcome:
    """The observation and the progress after a move."""

    observation: str
    progress: float
    """Progress from 0.0 to 1.0; 1.0 is solved."""

    @property
    def solved(self) -> bool:
        return self.progress >= 1.0
