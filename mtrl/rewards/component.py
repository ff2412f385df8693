"""One component of the reward: an entry of `reward.components`, checked and resolved before the first episode."""

from __future__ import annotations

import copy
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from mtrl.errors import UserError
from mtrl.rewards.checked import check_parameters
from mtrl.rewards.group_function import as_group_function, group_rewards, takes_group
from mtrl.rewards.shaping import SHAPINGS
from mtrl.rewards.user_function import RewardFunction, as_function, check_call, per_turn, result_of
from mtrl.types import ENVIRONMENT, Group, Row, Trajectory
from mtrl.utils.plain_numbers import LARGEST_METRIC, named, shown
from mtrl.utils.process_guard import exit_as_error
from mtrl.utils.user_code import load_function

Values = Callable[[Trajectory, Row], Sequence[Any] | Awaitable[Sequence[Any]]]
"""Function from a trajectory of T >= 1 turns to T values, or to an awaitable of them."""


GroupValues = Callable[[Group], Awaitable[list[list[Any]]]]
"""Function from a group of N trajectories, each with T >= 1 turns, to an awaitable of N lists of T values."""


@dataclass(frozen=True)
class Component:
    """A component of the reward: name, weight, and the function that computes its value for each turn."""

    name: str
    weight: float
    values: Values | None
    """None for a component that compares the trajectories of a group."""
    group_values: GroupValues | None = None
    reported: bool = False
    """Whether the environment must report the component, in `StepResult.components`."""


def parse_component(name: str, spec: Any) -> Component:
    """Read `name: weight`, or `name: {weight: 1.0, target: package.module.function, **parameters}`.

    A name is resolved in this order: the dotted path of a user's function (or any name, with `target`), which compares
    the trajectories of a group if its first parameter is called `group`; a built-in shaping; `environment`; a component
    that the environment reports.

    Raises:
        UserError: the weight is not a finite number, the function cannot be imported or does not take the parameters,
            or a component without a function has parameters.
    """
    key = f"reward.components.{name}"
    parameters = dict(spec) if isinstance(spec, Mapping) else {"weight": spec}
    weight = _weight(parameters.pop("weight", 1.0), key)
    target = parameters.pop("target", name if "." in name else None)
    if target is not None:
        function = load_function(target, key)
        if takes_group(function):
            group_function = as_group_function(function, parameters, key)
            check_parameters(function, parameters)
            return Component(name, weight, None, partial(group_rewards, group_function, key))
        reward_function = as_function(function, parameters, key)
        check_parameters(function, parameters)
        return Component(name, weight, partial(_user_rewards, reward_function, key))
    if name in SHAPINGS:
        function = SHAPINGS.find(name).function
        check_call(function, (None, {}), parameters, key)
        check_parameters(function, parameters)
        return Component(name, weight, partial(_shaped, partial(function, **parameters), key))
    if parameters:
        raise UserError(
            f"{key} has parameters ({', '.join(parameters)}) but is not a built-in shaping; "
            f"choose one of {', '.join(SHAPINGS.names())}, or name a function of yours: {key}.target=module.function"
        )
    if name == ENVIRONMENT:
        return Component(name, weight, _environment)
    return Component(name, weight, partial(_reported, name), reported=True)


def _environment(trajectory: Trajectory, row: Row) -> list[float]:
    return trajectory.environment_rewards


def _reported(name: str, trajectory: Trajectory, row: Row) -> list[Any]:
    return [turn.components.get(name, 0.0) for turn in trajectory.turns]


async def _shaped(function: Callable[..., Any], key: str, trajectory: Trajectory, row: Row) -> list[Any]:
    """Return the values of a shaping, one per turn; a single number is the value of the last turn.

    Raises:
        UserError: the shaping failed, or returned another number of values than turns.
    """
    return per_turn(await result_of(lambda: function(trajectory, row), key), trajectory, key)


async def _user_rewards(function: RewardFunction, key: str, trajectory: Trajectory, row: Row) -> list[Any]:
    """Return the values of a user's reward function, one per turn; a single number is the value of the last turn. Its
    metrics are added to the trajectory's.

    Raises:
        UserError: the function failed, or returned another number of rewards than turns, or invalid metrics.
    """
    # A copy, since the scorer reads the same messages, and the record of the run keeps them.
    messages = copy.deepcopy(trajectory.messages)
    result = await result_of(lambda: function(messages, row), key)
    has_metrics = isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping | None)
    reward, metrics = result if has_metrics else (result, None)
    try:
        with exit_as_error():
            trajectory.metrics |= named(metrics or {}, f"{key} returned metrics", LARGEST_METRIC)
    except TypeError as error:
        raise UserError(f"{error} (trajectory {trajectory.index} of group {trajectory.group_id})") from error
    return per_turn(reward, trajectory, key)


def _weight(value: Any, key: str) -> float:
    number = math.nan
    if isinstance(value, int | float) and not isinstance(value, bool):
        with suppress(OverflowError):  # whole numbers of YAML may exceed the range of floats
            number = float(value)
    if not math.isfinite(number):
        raise UserError(f"{key}={shown(value)} is not a weight; write a finite number, or {{weight: 1.0, ...}}")
    return number
