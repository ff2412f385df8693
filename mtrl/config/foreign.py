"""Suggestions for a key or value of another framework: the corresponding key and value of mtrl."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import mtrl
from mtrl.algorithms.registry import ESTIMATORS, REDUCTIONS
from mtrl.config import keys
from mtrl.config.choices import CHOICES, WITH_TORCH
from mtrl.config.dialect_values import CONVERT, NEEDS, VALUES, WHEN_FALSE
from mtrl.config.dialects import FRAMEWORKS

EXPERIMENTS = Path(mtrl.__file__).parent.parent / "conf" / "experiment"


@dataclass(frozen=True)
class Found:
    """A foreign key and its replacement in mtrl."""

    framework: str
    key: str
    ours: str

    def advice(self, value: str | None) -> str:
        """Return the advice for `key=value`: the override to write, or a sentence."""
        if " " in self.ours:
            return self.ours
        if value is None:
            return f"write {self.ours}"
        proposed = self.proposal(value)
        return f"write {proposed}" if proposed else f"set {self.ours}, {_allowed(self.ours.partition('=')[0])}"

    def proposal(self, value: str) -> str | None:
        """Return the equivalent overrides of `key=value`, as typed in a shell; None if there are none."""
        if " " in self.ours:
            return None
        if "=" in self.ours:
            return {"true": self.ours, "false": WHEN_FALSE.get(self.ours)}.get(value.lower())
        convert = CONVERT.get(self.key.rpartition(".")[2])
        try:
            first, *more = translate(self.ours, convert(value) if convert else value).split(" ")
        except ValueError:
            return None
        if not keys.takes(self.ours, first) or first not in (_words(self.ours) or (first,)):
            return None
        if first == "null" and self.ours in NEEDS:
            return None
        return " ".join([f"{self.ours}={first}", *more, *([NEEDS[self.ours]] if self.ours in NEEDS else [])])


def _words(key: str) -> tuple[str, ...] | None:
    """Return the words that a key takes; None if it is not limited to a set of words."""
    if key == "experiment":
        return tuple(sorted(file.stem for file in EXPERIMENTS.glob("*.yaml")))
    if registry := next((known for known in (ESTIMATORS, REDUCTIONS) if known.key == key), None):
        return tuple(registry.names())
    return CHOICES.get(key) or WITH_TORCH.get(key)


def _allowed(key: str) -> str:
    """Return a description of the values that a key takes."""
    words, known = _words(key), keys.find(key)
    return f"one of {', '.join(words)}" if words else known.expected() if known else "another value"


def translate(key: str, value: str) -> str:
    """Translate a foreign value of our key `key`; an unknown value is returned unchanged."""
    return VALUES.get(key, {}).get(value, value)


def find_exact(path: str) -> Found | None:
    """Return the table entry of exactly this foreign key, or None."""
    return next((Found(name, path, table[path]) for name, table in FRAMEWORKS.items() if path in table), None)


def find_ending(path: str) -> Found | None:
    """Return the entry with the same ending as `path`, for keys without their section or in another one. The longest
    ending is tried first; None if no ending leads to a single key of mtrl."""
    words = path.split(".")
    for start in range(len(words)):
        ending = ".".join(words[start:])
        hits = [
            Found(name, key, ours)
            for name, table in FRAMEWORKS.items()
            for key, ours in table.items()
            if f".{key}".endswith(f".{ending}")
        ]
        hits = [hit for hit in hits if keys.is_meant(hit.ours, path)] or hits
        if len({hit.ours for hit in hits}) == 1:
            return hits[0]
    return None
