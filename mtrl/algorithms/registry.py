"""Registries of the functions that keys such as `algorithm.advantage_method: grpo` name.

A registry finds its functions by name and alias, imports the module of the built-in functions on the first lookup
(so that nothing here needs torch), and accepts a dotted path `my_pkg.my_mod.fn` for a user's own function.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mtrl.config.keys import list_registered
from mtrl.errors import UserError
from mtrl.utils.user_code import load_function


@dataclass(frozen=True)
class RegisteredFunction:
    """A function with the properties that its callers need. Calling the entry calls the function."""

    name: str
    function: Callable[..., Any]
    needs_group: bool = False
    """Estimators: whether it compares trajectories of one prompt, so that `algorithm.group_size` must be at least 2."""
    credits: tuple[str, ...] = ()
    """Estimators: the values of `algorithm.credit` that it supports, the default first; empty: the credit is fixed."""
    needs_critic: bool = False
    """Estimators: whether it reads the values of a critic."""
    per_token: bool = False
    """Estimators: whether it returns one advantage per sampled token, not per turn."""
    per_trajectory: bool = False
    """Losses and corrections: whether it needs all tokens of a trajectory in one micro-batch."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


class Registry:
    """The functions that one config key can name."""

    def __init__(self, key: str, home: str):
        self.key = key
        self.home = home
        """Module that registers the built-in functions when it is imported."""
        self._entries: dict[str, RegisteredFunction] = {}
        self._aliases: dict[str, str] = {}

    def register(self, name: str, *, aliases: Sequence[str] = (), **traits: Any) -> Callable:
        """Decorator that registers the function under `name` and its aliases and returns it unchanged.

        Args:
            traits: the other fields of `RegisteredFunction`.

        Raises:
            ValueError: one of the names is already registered.
        """

        def decorate(function: Callable) -> Callable:
            for word in (name, *aliases):
                if word in self._entries or word in self._aliases:
                    raise ValueError(f"{self.key}={word} is already registered")
            self._entries[name] = RegisteredFunction(name, function, **traits)
            self._aliases.update(dict.fromkeys(aliases, name))
            list_registered(self.key, (name, *aliases))
            return function

        return decorate

    def __contains__(self, name: str) -> bool:
        importlib.import_module(self.home)
        return name in self._entries or name in self._aliases

    def names(self) -> list[str]:
        """Return all names and aliases, sorted."""
        importlib.import_module(self.home)
        return sorted({*self._entries, *self._aliases})

    def find(self, name: str) -> RegisteredFunction:
        """Return the entry called `name`, or an entry of the function at the dotted path `name`.

        Raises:
            UserError: the name is unknown, or the path cannot be imported or is not callable.
        """
        if name in self:
            return self._entries[self._aliases.get(name, name)]
        if "." in name:
            function = load_function(name, self.key)
            # A user's module may have registered the function with its traits while it was imported.
            return next(
                (e for e in self._entries.values() if e.function is function), RegisteredFunction(name, function)
            )
        raise UserError(unknown(self.key, name, self.names()))


def unknown(key: str, value: str, known: Sequence[str]) -> str:
    """Return the error message for an unknown value, with the nearest known value and all known values."""
    nearest = difflib.get_close_matches(value, known, n=1, cutoff=0.5)
    hint = f" (did you mean {nearest[0]}?)" if nearest else ""
    return f"{key}={value} is not known{hint}; choose one of {', '.join(known)}, or package.module.function"


ESTIMATORS = Registry("algorithm.advantage_method", "mtrl.algorithms.advantages")
LOSSES = Registry("algorithm.loss_fn", "mtrl.algorithms.losses")
REDUCTIONS = Registry("algorithm.loss_reduction", "mtrl.algorithms.reductions")
CORRECTIONS = Registry("algorithm.off_policy_correction", "mtrl.algorithms.corrections")
KL_ESTIMATORS = Registry("algorithm.kl_estimator", "mtrl.algorithms.kl")

advantage_estimator = ESTIMATORS.register
policy_loss = LOSSES.register
reduction = REDUCTIONS.register
off_policy_correction = CORRECTIONS.register
kl_estimator = KL_ESTIMATORS.register
find_estimator = ESTIMATORS.find
find_loss = LOSSES.find
find_reduction = REDUCTIONS.find
find_correction = CORRECTIONS.find
find_kl = KL_ESTIMATORS.find
