"""Who types another framework's key or value is told ours."""

from __future__ import annotations

from dataclasses import dataclass

from mtrl.config import keys
from mtrl.config.dialects import CONVERT, FRAMEWORKS, VALUES


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
        if "=" in self.ours or value is None:
            return f"write {self.ours}"
        return f"write {self.ours}={translate(self.ours, self._converted(value))}"

    def _converted(self, value: str) -> str:
        convert = CONVERT.get(self.key.rpartition(".")[2])
        try:
            return convert(value) if convert else value
        except ValueError:
            return "..."


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
