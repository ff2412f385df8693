"""Costs of all parts of a step, with their sources (`costs.yaml`)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import yaml

SOURCES = ("measured", "cited", "assumed")
"""Sources of a cost: measured by `measure.py` on the machine that the file names, published by others, or neither."""
PARTS = ("gpu", "network", "turns", "answers", "step", "handout", "sync")
"""Parts of a cost: GPUs and networks, which every design needs, the work for each turn, of rank 0 or of rollout
workers, and the work of rank 0 for the answers of workers, each step, the hand-out of a batch, and the sending of new
weights."""
LEADER = ("turns", "answers", "step", "handout", "sync")
"""Parts of rank 0. Without the costs of turns, those of rollout workers are 0 too."""


@dataclass(frozen=True)
class Cost:
    value: float
    unit: str
    part: str
    source: str
    note: str


@dataclass(frozen=True)
class Costs:
    """Costs by name: `costs["turn"]` is a number."""

    table: dict[str, Cost]

    @classmethod
    def read(cls, path: Path) -> Costs:
        """
        Raises:
            ValueError: a line has no known part or source, no note, or a negative value.
        """
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        table = {name: Cost(**line) for name, line in content["costs"].items()}
        for name, cost in table.items():
            if cost.source not in SOURCES or cost.part not in PARTS or not cost.note.strip() or not cost.value >= 0:
                raise ValueError(f"{path}: {name} needs a value, a part of {PARTS}, a source of {SOURCES} and a note")
        return cls(table)

    def __getitem__(self, name: str) -> float:
        return self.table[name].value

    def without(self, parts: Collection[str]) -> Costs:
        """Return the same costs, with 0 for these parts."""
        free = {name: Cost(0.0, c.unit, c.part, c.source, c.note) for name, c in self.table.items() if c.part in parts}
        return Costs(self.table | free)

    def changed(self, **values: float) -> Costs:
        """Return the same costs with other values for these names."""
        given = {name: Cost(value, *list(vars(self.table[name]).values())[1:]) for name, value in values.items()}
        return Costs(self.table | given)
