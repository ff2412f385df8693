"""Environments of other frameworks, run unchanged: `environment.target=my_package.TheirEnvironment`.

A foreign class is recognised by the framework that it inherits from, or by its methods if its framework needs no base
class. A function that makes such objects is recognised by its return annotation, so that the frameworks' own
`make` works: `environment.target=gymnasium.make environment.config.id=FrozenLake-v1`.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from importlib import import_module
from typing import Any

from mtrl.environments.base import BaseEnvironment

_BASES = {
    ("skyrl_gym", "Env"): "skyrl_gym.SkyRLGymAdapter",
    ("gymnasium", "Env"): "gymnasium.GymnasiumAdapter",
    ("gym", "Env"): "gymnasium.GymnasiumAdapter",
    ("openenv", "MCPEnvironment"): "openenv_tools.OpenEnvToolsAdapter",
    ("openenv", "MCPClientBase"): "openenv_tools.OpenEnvToolsAdapter",
    ("openenv", "Environment"): "openenv.OpenEnvAdapter",
    ("openenv", "EnvClient"): "openenv.OpenEnvAdapter",
    ("tinker_cookbook", "MessageEnv"): "tinker.MessageEnvAdapter",
    ("verifiers", "Environment"): "verifiers.VerifiersAdapter",
}
"""(package, base class) -> adapter."""

_METHODS = {
    "initial_observation": "tinker.MessageEnvAdapter",
    "init": "skyrl_gym.SkyRLGymAdapter",
    "reset": "gymnasium.GymnasiumAdapter",
}
"""Method that starts an episode, in a class that has `step(action)` -> adapter."""

_EXTRAS = {
    "gymnasium": "gymnasium",
    "skyrl_gym": "skyrl-gym",
    "openenv": "openenv",
    "openenv_core": "openenv",
    "tinker_cookbook": "tinker",
    "verifiers": "verifiers",
}
"""Package -> the extra that installs it."""

_FAMILY_PARTS = ("load", "score", "demonstrate", "gold", "decoys")
"""Names of static methods by which a class may define parts of its task family."""


def adapt(value: Any) -> type[BaseEnvironment] | None:
    """Return an environment class for a foreign class or a function that makes its objects; None for other values."""
    kind = value if isinstance(value, type) else _returned(value)
    where = None if kind is None else _by_base(kind) or _by_methods(kind)
    if where is None:
        return None
    module, name = where.split(".")
    adapter = getattr(import_module(f"{__name__}.{module}"), name)
    own = {key: getattr(value, key) for key in _FAMILY_PARTS if _is_static(value, key)}
    members = {"foreign": staticmethod(value), "__doc__": value.__doc__, "__module__": value.__module__}
    return type(value.__name__, (adapter,), members | {key: staticmethod(f) for key, f in own.items()})


def extra_hint(error: BaseException) -> str:
    """Return how to install the framework that an `ImportError` names; an empty text for any other error."""
    name = (getattr(error, "name", None) or "").partition(".")[0] if isinstance(error, ImportError) else ""
    return f"install it with: pip install 'mtrl-agents[{_EXTRAS[name]}]'" if name in _EXTRAS else ""


def _is_static(value: Any, name: str) -> bool:
    return isinstance(inspect.getattr_static(value, name, None), staticmethod | classmethod)


def _returned(function: Any) -> type | None:
    if not inspect.isfunction(function):
        return None
    try:
        returned = typing.get_type_hints(function).get("return")
    except Exception:  # annotations are arbitrary code
        return None
    returned = typing.get_origin(returned) or returned
    return returned if isinstance(returned, type) else None


def _by_base(kind: Any) -> str | None:
    for cls in kind.__mro__:
        if where := _BASES.get((cls.__module__.partition(".")[0], cls.__name__)):
            return where
    return None


def _by_methods(kind: Any) -> str | None:
    """Return the adapter of a class that has the methods of a framework but not its base class."""
    if issubclass(kind, BaseEnvironment):
        return None
    methods = {name for name, _ in inspect.getmembers(kind, inspect.isfunction) if not name.startswith("_")}
    if "step" not in methods:
        return "trl.TRLAdapter" if "reset" in methods and len(methods) > 1 else None
    if len(_required(kind.step)) != 1:
        return None
    found = (where for method, where in _METHODS.items() if method in methods)
    return next(found, None)


def _required(method: Callable[..., Any]) -> list[str]:
    """Return the names of the required positional arguments, without `self`."""
    parameters = list(inspect.signature(method).parameters.values())[1:]
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in parameters if p.kind in positional and p.default is p.empty]
