"""Values that are made at their first use, and kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class lazy(Generic[T]):  # noqa: N801: it is used as `property` is
    """`functools.cached_property` without its lock.

    Up to Python 3.11 that lock is one for all instances of a class: a value that never comes, as from a task that
    hangs, would hold up every other checklist of the process.
    """

    def __init__(self, make: Callable[[Any], T]):
        self._make = make
        self.__doc__ = make.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type | None = None) -> T:
        value: T = self._make(instance)
        instance.__dict__[self._name] = value  # found there first from now on
        return value
