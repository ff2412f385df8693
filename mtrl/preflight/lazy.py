"""Attributes that are computed at their first use and then cached."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class lazy(Generic[T]):  # named like `property`, since it is used like it
    """`functools.cached_property` without its lock.

    Up to Python 3.11 all instances of a class share that lock: a value whose computation never ends, as with a task
    that hangs, would block every other checklist of the process.
    """

    def __init__(self, make: Callable[[Any], T]):
        self._make = make
        self.__doc__ = make.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type | None = None) -> T:
        value: T = self._make(instance)
        instance.__dict__[self._name] = value  # later reads find it here first
        return value
