"""Suggestions for a key or value of another framework: the corresponding key and value of mtrl."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import mtrl
from mtrl.config import keys
from mtrl.config.dialect_values import (
    CONVERT,
    FOREIGN_WHEN_FALSE,
    NEEDS,
    VALUES,
    VALUES_OF_FOREIGN_KEY,
    WHEN_FALSE,
    NoEquivalentError,
)
from mtrl.config.dialects import FRAMEWORKS

EXPERIMENTS = Path(mtrl.__file__).parent.parent / "conf" / "experiment"


@dataclass(frozen=True)
class ForeignKey:
    """A foreign key and its replacement in mtrl."""

    framework: str
    key: str
    ours: str

    def advice(self, value: str | None) -> str:
        """Return the advice for `key=value`: the override to write, or a sentence."""
        if value is None:
            return self.ours if " " in self.ours else f"write {self.ours}"
        ours = self._ours(value)
        if " " in ours:
            return ours
        try:
            proposed = self._proposal(value)
        except NoEquivalentError as error:
            return str(error)
        return f"write {proposed}" if proposed else f"set {ours}, {allowed(ours.partition('=')[0])}"

    def proposal(self, value: str) -> str | None:
        """Return the equivalent overrides of `key=value`, as typed in a shell; None if there are none."""
        try:
            return self._proposal(value)
        except NoEquivalentError:
            return None

    def _ours(self, value: str) -> str:
        """Return our key, our setting or a sentence for this value of the foreign key."""
        if value.lower() != "false":
            return self.ours
        return FOREIGN_WHEN_FALSE.get(self.key) or WHEN_FALSE.get(self.ours, self.ours)

    def _proposal(self, value: str) -> str | None:
        ours = self._ours(value)
        if " " in ours:
            return None
        if "=" in ours:
            return ours if value.lower() in ("true", "false") else None
        convert = CONVERT.get(self.key.rpartition(".")[2])
        own = VALUES_OF_FOREIGN_KEY.get(self.key, VALUES.get(ours, {}))
        try:
            return written(ours, convert(value) if convert else value, own)
        except NoEquivalentError:
            raise
        except ValueError:
            return None


def written(key: str, value: str, values: Mapping[str, str] | None = None) -> str | None:
    """Return the overrides that set our key to a value that may be another framework's, as typed in a shell.

    Args:
        values: foreign value -> our value; None: the table of `key` in `VALUES`.

    Returns:
        The overrides, separated by spaces; None if the key does not take the value.
    """
    values = VALUES.get(key, {}) if values is None else values
    first, *more = values[value].split(" ") if value in values else [value]
    is_known = first in (_words(key) or (first,)) or ("." in first and _takes_functions(key))
    if not (is_known and keys.takes(key, first)):
        return None
    if first == "null" and key in NEEDS:
        return None
    setting = f"{key}={first}"
    return " ".join(
        [shlex.quote(setting) if " " in first else setting, *more, *([NEEDS[key](first)] if key in NEEDS else [])]
    )


def meant(key: str, path: str, value: str | None) -> str:
    """Return the question about the key of mtrl that a wrong `path` probably means: `did you mean seed=1?`"""
    if value is None or keys.is_vague(key, path):
        return f"did you mean {key}?"
    proposed = written(key, value)
    return f"did you mean {proposed}?" if proposed else f"did you mean {key}? It takes {allowed(key)}"


def _takes_functions(key: str) -> bool:
    """Return whether a key also takes a function of the user's own, as `package.module.function`."""
    return key in keys.all_keys() and bool(keys.all_keys()[key].functions)


def _words(key: str) -> tuple[str, ...]:
    """Return the words that a key takes; empty if it is not limited to a set of words."""
    if key == "experiment":
        return tuple(sorted(file.stem for file in EXPERIMENTS.glob("*.yaml")))
    return keys.words(key)


def allowed(key: str) -> str:
    """Return a description of the values that a key takes."""
    words, known = _words(key), keys.find(key)
    if words:
        return f"one of {', '.join(words)}" + (", or package.module.function" if _takes_functions(key) else "")
    return known.expected() if known else "another value"


def translate(key: str, value: str) -> str:
    """Translate a foreign value of our key `key`; an unknown value is returned unchanged."""
    return VALUES.get(key, {}).get(value, value)


def find_exact(path: str) -> ForeignKey | None:
    """Return the table entry of exactly this foreign key, or None."""
    return next((ForeignKey(name, path, table[path]) for name, table in FRAMEWORKS.items() if path in table), None)


def find_ending(path: str, least: int = 1) -> ForeignKey | None:
    """Return the entry with the same ending as `path`, for keys without their section or in another one. The longest
    ending is tried first; None if no ending leads to a single key of mtrl.

    Args:
        least: minimum number of words of the ending.
    """
    words = path.split(".")
    for start in range(len(words) - least + 1):
        ending = ".".join(words[start:])
        hits = [
            ForeignKey(name, key, ours)
            for name, table in FRAMEWORKS.items()
            for key, ours in table.items()
            if f".{key}".endswith(f".{ending}")
        ]
        hits = [hit for hit in hits if keys.is_meant(hit.ours, path)] or hits
        if len({hit.ours for hit in hits}) == 1:
            return hits[0]
    return None
