"""Names of functions: what `algorithm.advantage_method: grpo` and its neighbours point to.

A registry knows its functions by name and alias, imports the module that holds the built-in ones on the first lookup
(so that nothing here needs torch), and takes a dotted path `my_pkg.my_mod.fn` for a function of the user's own.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mtrl.errors import UserError, reason


@dataclass(frozen=True)
class Entry:
    """A function and what its callers must know of it. Calling the entry calls the function."""

    name: str
    function: Callable[..., Any]
    needs_group: bool = False
    """It compares trajectories of one prompt: `algorithm.group_size` must be at least 2."""
    credits: tuple[str, ...] = ()
    """Estimators: the values of `algorithm.credit` that it has, its own first; empty: it cannot be chosen."""
    needs_critic: bool = False
    """Estimators: it reads the values of a critic."""
    per_token: bool = False
    """Estimators: one advantage per sampled token, not per turn."""
    per_trajectory: bool = False
    """Losses and corrections: it needs all tokens of a trajectory at once."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


class Registry:
    """The functions that one config key chooses from."""

    def __init__(self, key: str, home: str):
        self.key = key
        self.home = home
        """Module that registers the built-in functions when it is imported."""
        self._entries: dict[str, Entry] = {}
        self._aliases: dict[str, str] = {}

    def register(self, name: str, *, aliases: Sequence[str] = (), **traits: Any) -> Callable:
        """Decorator: make the function known as `name` and by its aliases; the function itself is returned unchanged.

        Args:
            traits: the other fields of `Entry`.

        Raises:
            ValueError: one of the names is already taken by another function.
        """

        def decorate(function: Callable) -> Callable:
            for word in (name, *aliases):
                if word in self._entries or word in self._aliases:
                    raise ValueError(f"{self.key}={word} is already registered")
            self._entries[name] = Entry(name, function, **traits)
            self._aliases.update(dict.fromkeys(aliases, name))
            return function

        return decorate

    def __contains__(self, name: str) -> bool:
        importlib.import_module(self.home)
        return name in self._entries or name in self._aliases

    def names(self) -> list[str]:
        """Every name and alias, sorted."""
        importlib.import_module(self.home)
        return sorted({*self._entries, *self._aliases})

    def find(self, name: str) -> Entry:
        """The entry called `name`, or the function at the dotted path `name`.

        Raises:
            UserError: nothing of that name, or the path cannot be imported or is not callable.
        """
        if name in self:
            return self._entries[self._aliases.get(name, name)]
        if "." in name:
            function = load_function(name, self.key)
            # A user's module may have registered the function with its traits while it was imported.
            return next((e for e in self._entries.values() if e.function is function), Entry(name, function))
        raise UserError(unknown(self.key, name, self.names()))


def unknown(key: str, value: str, known: Sequence[str]) -> str:
    """The sentence for a value that is not among the known ones: the nearest, then all."""
    nearest = difflib.get_close_matches(value, known, n=1, cutoff=0.5)
    hint = f" (did you mean {nearest[0]}?)" if nearest else ""
    return f"{key}={value} is not known{hint}; choose one of {', '.join(known)}, or package.module.function"


def load_function(path: str, key: str) -> Callable[..., Any]:
    """The callable at a dotted path; `key` is the config key that the error names.

    Raises:
        UserError: it cannot be imported, or is not callable; or what the module itself raises.
    """
    from mtrl.process_guard import import_guarded  # brings asyncio, which --help does without

    module, _, attribute = path.rpartition(".")
    try:
        function = getattr(import_guarded(module), attribute)
    except UserError:  # it says itself what it lacks
        raise
    except Exception as error:  # the module is the user's: importing it can fail in any way
        expected = isinstance(error, ImportError | AttributeError | ValueError)
        said = error if expected else reason(error)
        raise UserError(f"{key}={path} cannot be imported ({said}); write package.module.function") from error
    if not callable(function):
        raise UserError(f"{key}={path} is a {type(function).__name__}; it must be a function")
    return function


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
