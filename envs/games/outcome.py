"""What a move led to."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Outcome:
    """What the player sees after a move, and how far it is."""

    observation: str
    progress: float
    """0.0 to 1.0; 1.0 is solved."""

    @property
    def solved(self) -> bool:
        return self.progress >= 1.0
