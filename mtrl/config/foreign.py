"""Who types another framework's key or value is told ours."""

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
    """A foreign key and what to write instead."""

    framework: str
    key: str
    ours: str

    def advice(self, value: str | None) -> str:
        """What to write here for `key=value`."""
        if " " in self.ours:
            return self.ours
        if value is None:
            return f"write {self.ours}"
        proposed = self.proposal(value)
        return f"write {proposed}" if proposed else f"set {self.ours}, {_allowed(self.ours.partition('=')[0])}"

    def proposal(self, value: str) -> str | None:
        """The overrides that mean `key=value` here, as one types them in a shell; None where there are none."""
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
    """The words that a key takes, if it takes one of a few."""
    if key == "experiment":
        return tuple(sorted(file.stem for file in EXPERIMENTS.glob("*.yaml")))
    if registry := next((known for known in (ESTIMATORS, REDUCTIONS) if known.key == key), None):
        return tuple(registry.names())
    return CHOICES.get(key) or WITH_TORCH.get(key)


def _allowed(key: str) -> str:
    """What a key takes, in words."""
    words, known = _words(key), keys.find(key)
    return f"one of {', '.join(words)}" if words else known.expected() if known else "another value"


def translate(key: str, value: str) -> str:
    """Our value of `key` for a foreign one."""
    return VALUES.get(key, {}).get(value, value)


def find_exact(path: str) -> Found | None:
    """The table entry of exactly this key."""
    return next((Found(name, path, table[path]) for name, table in FRAMEWORKS.items() if path in table), None)


def find_ending(path: str) -> Found | None:
    """The entry that ends as `path` does, for keys without their section or in another one; longest ending first."""
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
