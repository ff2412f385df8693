"""State that outlives an episode: class attributes and module globals of a task's own code."""

from __future__ import annotations

import inspect
import pickle
import sys
from types import FunctionType, ModuleType
from typing import Any

from mtrl.environments.base import BaseEnvironment
from mtrl.environments.family import Family

OURS = "mtrl"
"""Top-level package of the library, whose state is not the task's."""


def snapshot(family: Family) -> dict[str, bytes]:
    """Return the serialised value of each variable by name. Functions, classes and modules do not count."""
    seen = {}
    for module in _modules(family):
        for name, value in vars(module).items():
            if isinstance(value, type) and value.__module__ == module.__name__:
                for attribute, held in vars(value).items():
                    if _is_state(attribute, held):
                        seen[f"{module.__name__}.{name}.{attribute}"] = _bytes(held)
            elif _is_state(name, value):
                seen[f"{module.__name__}.{name}"] = _bytes(value)
    return seen


def changed(before: dict[str, bytes], after: dict[str, bytes]) -> list[str]:
    """Return the names of the variables that are new or have another value."""
    return sorted(name for name, value in after.items() if before.get(name) != value)


def _modules(family: Family) -> list[ModuleType]:
    """Return the modules of the environment class, its bases, the scorer and gold, and the other modules of their
    packages."""
    environment = family.environment
    owners = list(inspect.getmro(environment)) if isinstance(environment, type) else [environment]
    owners = [owner for owner in owners if owner not in (BaseEnvironment, object)]
    owned = [getattr(owner, "__module__", None) or "builtins" for owner in (*owners, family.score, family.gold)]
    names = {name for name in owned if name.partition(".")[0] not in (OURS, "builtins")}
    packages = {name.rpartition(".")[0] for name in names} - {""}
    inside = {name for name in sys.modules if name.rpartition(".")[0] in packages or name in packages}
    return [sys.modules[name] for name in sorted({*names, *inside}) if name in sys.modules]


def _is_state(name: str, value: Any) -> bool:
    is_code = isinstance(value, ModuleType | type | FunctionType | property | classmethod | staticmethod)
    return not (name.startswith("__") or is_code or (callable(value) and not hasattr(value, "__dict__")))


def _bytes(value: Any) -> bytes:
    try:
        return pickle.dumps(value)
    except Exception:  # locks, sockets, closures: objects that cannot be serialised are compared by identity
        return f"{type(value)} at {id(value)}".encode()
