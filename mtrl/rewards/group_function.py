"""Reward functions that compare the trajectories of a group: their form, and the call of one.

The first parameter is called `group`. It is a function, which may be async, or a class, of which one instance is made
with the parameters of the configuration and called with each group::

    def fastest(group: Group, *, margin: int = 0) -> list[float]: ...

It returns one reward per trajectory: a number for its last turn, or a list with one number for each turn; alone, or in
a tuple with a list of one dict of metrics per trajectory.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from mtrl.errors import UserError
from mtrl.rewards.user_function import check_call, per_turn, result_of
from mtrl.types import Group
from mtrl.utils.plain_numbers import LARGEST_METRIC, named, shown
from mtrl.utils.process_guard import exit_as_error

GroupFunction = Callable[[Group], Any]


def takes_group(target: Callable[..., Any]) -> bool:
    """Return whether the first parameter of a function, or of the instances of a class, is called `group`."""
    if inspect.isclass(target):
        names = list(inspect.signature(target.__call__).parameters)[1:]
    else:
        names = list(inspect.signature(target).parameters)
    return names[:1] == ["group"]


def as_group_function(target: Callable[..., Any], parameters: Mapping[str, Any], key: str) -> GroupFunction:
    """Return a function of a group that calls `target` with its parameters.

    Raises:
        UserError: `target` does not take these parameters.
    """
    if inspect.isclass(target):
        check_call(target, (), parameters, key)
        instance: Any = target(**parameters)
        return instance
    check_call(target, (None,), parameters, key)
    return lambda group: target(group, **parameters)


async def group_rewards(function: GroupFunction, key: str, group: Group) -> list[list[Any]]:
    """Return one list of values per trajectory, with one value per turn. Metrics are added to the trajectories'.

    Args:
        group: a group whose trajectories have turns.

    Raises:
        UserError: the function failed, or returned another number of rewards than trajectories, or than turns of a
            trajectory, or invalid metrics.
    """
    result = await result_of(lambda: function(group), key)
    has_metrics = isinstance(result, tuple) and len(result) == 2 and _are_dicts(result[1])
    rewards, metrics = result if has_metrics else (result, [])
    values, count = rewards.tolist() if hasattr(rewards, "tolist") else rewards, len(group.trajectories)
    if not isinstance(values, list | tuple):
        raise UserError(
            f"{key} gave {shown(values)} for group {group.group_id}; return a list with one reward per trajectory"
        )
    for what, given in (("rewards", values), ("dicts of metrics", metrics)):
        if len(given) != count and (given is values or given):
            raise UserError(
                f"{key} gave {len(given)} {what} for the {count} trajectories of group {group.group_id}; return one "
                "for each trajectory, in their order"
            )
    try:
        with exit_as_error():
            for trajectory, found in zip(group.trajectories, metrics, strict=False):
                trajectory.metrics |= named(found, f"{key} returned metrics", LARGEST_METRIC)
    except TypeError as error:
        raise UserError(f"{error} (group {group.group_id})") from error
    return [per_turn(reward, trajectory, key) for reward, trajectory in zip(values, group.trajectories, strict=True)]


def _are_dicts(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(entry, Mapping) for entry in value)
