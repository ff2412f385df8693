"""What everything costs, and where that is known from: `costs.yaml`."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import yaml

SOURCES = ("measured", "cited", "assumed")
"""By `measure.py` on the machine that the file names; published by others; neither."""
PARTS = ("gpu", "network", "turns", "step", "handout", "sync")
"""GPUs and networks of any design; and what rank 0 does: for every turn, for every step, to hand a batch out, to send
new weights."""
LEADER = ("turns", "step", "handout", "sync")


@dataclass(frozen=True)
class Cost:
    value: float
    unit: str
    part: str
    source: str
    note: str


@dataclass(frozen=True)
class Costs:
    """Look one up by its name: `costs["turn"]`."""

    table: dict[str, Cost]

    @classmethod
    def read(cls, path: Path) -> Costs:
        """
        Raises:
            ValueError: a line says not where it is from, or what it is a part of.
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
        """The same, and these parts cost nothing."""
        free = {name: Cost(0.0, c.unit, c.part, c.source, c.note) for name, c in self.table.items() if c.part in parts}
        return Costs(self.table | free)

    def changed(self, **values: float) -> Costs:
        """The same but for these."""
        given = {name: Cost(value, *list(vars(self.table[name]).values())[1:]) for name, value in values.items()}
        return Costs(self.table | given)
