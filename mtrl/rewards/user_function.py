"""Adapters for a user's reward function, which make a function of messages and row from each supported form.

- `reward(messages, row)`, or `reward(messages, ground_truth)`, distinguished by the name of the second parameter;
- `reward(messages)`;
- a class with a field `ground_truth`: each episode gets an instance, which is called with the messages.

Each form may be async. It returns a number, or one number per turn, optionally in a tuple with a dict of metrics.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from mtrl.environments.detachable_task import DetachableTask
from mtrl.errors import UserError
from mtrl.types import Message, Row, Trajectory
from mtrl.utils.process_guard import exit_as_error
from mtrl.utils.user_code import reason

TRUTH = "ground_truth"
RewardFunction = Callable[[list[Message], Row], Any]


def as_function(target: Callable[..., Any], parameters: Mapping[str, Any], key: str) -> RewardFunction:
    """Return a function of messages and row that calls `target` with its parameters.

    Args:
        key: key of the configuration, for error messages.

    Raises:
        UserError: `target` takes neither messages and a row nor messages alone, or does not take these parameters.
    """
    if inspect.isclass(target):
        return _as_instances(target, parameters, key)
    names = list(inspect.signature(target).parameters)
    if len(names) > 1 and names[1] == TRUTH and TRUTH not in parameters:
        check_call(target, ([], {}), parameters, key)
        return lambda messages, row: target(messages, row[TRUTH], **parameters)
    if not _takes(target, ([], {}), parameters) and _takes(target, ([],), parameters):
        return lambda messages, row: target(messages, **parameters)
    check_call(target, ([], {}), parameters, key)
    return lambda messages, row: target(messages, row, **parameters)


def check_call(function: Callable[..., Any], positional: tuple[Any, ...], given: Mapping[str, Any], key: str) -> None:
    """Check that a function takes these positional and keyword arguments.

    Raises:
        UserError: it does not.
    """
    signature = inspect.signature(function)
    try:
        signature.bind(*positional, **given)
    except TypeError as error:
        raise UserError(f"{key} does not fit its function, which takes {signature}: {error}") from error


async def result_of(call: Callable[[], Any], key: str) -> Any:
    """Return the result of a call of a user's function, which may be async; `key` names its setting in the error.

    Raises:
        UserError: the function failed.
    """
    try:
        with exit_as_error():
            result = call()
        if inspect.isawaitable(result):
            result = await (DetachableTask(result) if inspect.iscoroutine(result) else result)
        return result
    except UserError:  # its message names the cause and the fix already
        raise
    except Exception as error:
        raise UserError(f"{key} failed: {reason(error)}; fix the reward function") from error


def at_last(value: Any, turns: int) -> list[Any]:
    """Return one value per turn: `value` for the last turn, 0 for the turns before it."""
    return [0.0] * (turns - 1) + [value]


def per_turn(reward: Any, trajectory: Trajectory, key: str) -> list[Any]:
    """Return the reward that a function gave a trajectory as one value per turn; a single number is that of the last
    turn.

    Raises:
        UserError: there is another number of values than turns.
    """
    values = reward.tolist() if hasattr(reward, "tolist") else reward  # arrays of numpy and torch
    if not isinstance(values, list | tuple):
        return at_last(values, len(trajectory.turns))
    if len(values) != len(trajectory.turns):
        raise UserError(
            f"{key} gave {len(values)} rewards for {len(trajectory.turns)} turns (trajectory {trajectory.index} of "
            f"group {trajectory.group_id}); return one number, or one for each turn"
        )
    return list(values)


def _takes(function: Callable[..., Any], positional: tuple[Any, ...], given: Mapping[str, Any]) -> bool:
    try:
        inspect.signature(function).bind(*positional, **given)
    except TypeError:
        return False
    return True


def _as_instances(cls: type, parameters: Mapping[str, Any], key: str) -> RewardFunction:
    """Return a function that creates an instance for each episode. The ground truth is passed to the constructor if it
    takes one, else set as an attribute."""
    constructed = TRUTH in inspect.signature(cls).parameters
    check_call(cls, (), {**parameters, TRUTH: {}} if constructed else parameters, key)
    check_call(cls.__call__, (None, []), {}, key)

    def reward_of(messages: list[Message], row: Row) -> Any:
        if constructed:
            return cls(**parameters, ground_truth=row[TRUTH])(messages)
        reward = cls(**parameters)
        reward.ground_truth = row[TRUTH]
        return reward(messages)

    return reward_of
