"""What an environment returns, and its checks and conversions for every loop that runs episodes."""

from __future__ import annotations

import json
import numbers
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from mtrl.environments.observation_size import bounded
from mtrl.types import ENVIRONMENT, ROLES, Message, Tools, Turn
from mtrl.utils.plain_numbers import LARGEST_METRIC, finite, named


@dataclass
class StepResult:
    """Result that `step` may return instead of the plain `(reward, observation, done)`."""

    reward: float
    observation: str | Message | list[Message] | None = None
    done: bool = False
    components: dict[str, float] = field(default_factory=dict)
    """Named parts of the reward. `reward.components` in the config weights them, and trackers log each one."""
    metrics: dict[str, float] = field(default_factory=dict)
    truncated: bool = False
    """Whether the turns ran out before the task was finished, as in Gymnasium; it counts only together with `done`."""


def as_step_result(value: Any, environment: Any, method: str = "step") -> StepResult:
    """Check the value that `step`, or another `method`, returned; numbers become plain floats.

    Raises:
        TypeError: the value is neither `(reward, observation, done)` nor a `StepResult`, a number in it is not finite,
            or a component has the name of the reward itself.
    """
    name = f"{type(environment).__name__}.{method}"
    if isinstance(value, tuple) and len(value) == 3:
        value = StepResult(*value)
    if not isinstance(value, StepResult):
        raise TypeError(f"{name} returned {value!r:.200}; it must return (reward, observation, done) or a StepResult")
    return replace(
        value,
        reward=finite(value.reward, f"{name} returned the reward"),
        done=_truth(value.done, f"{name} returned done"),
        truncated=_truth(value.truncated, f"{name} returned truncated"),
        components=_components(value.components or {}, name),
        metrics=named(value.metrics or {}, f"{name} returned metrics", LARGEST_METRIC),
    )


def add_truncation(turn: Turn, value: Any, environment: Any) -> None:
    """Add what `truncate` returned to a turn: reward components, or a `StepResult` with a reward of its own.

    Raises:
        TypeError: `value` is neither a mapping from names to finite numbers nor a valid `StepResult`.
    """
    name = f"{type(environment).__name__}.truncate"
    if isinstance(value, StepResult):
        result = as_step_result(value, environment, "truncate")
    elif isinstance(value, dict):
        components = _components(value, name)
        result = StepResult(sum(components.values()), components=components)
    else:
        raise TypeError(f"{name} returned {value!r:.200}; it must return a mapping from names to numbers")
    turn.reward += result.reward
    turn.metrics.update(result.metrics)
    for key, part in result.components.items():
        turn.components[key] = turn.components.get(key, 0.0) + part


def as_tools(tools: Any, environment: Any) -> Tools:
    """Return the schemas of tools that an environment offers, as a list.

    Raises:
        TypeError: they are no list of schemas, but for example the tools by name.
    """
    if not isinstance(tools, list | tuple) or not all(isinstance(schema, dict) for schema in tools):
        raise TypeError(
            f"{type(environment).__name__}.tools is {tools!r:.200}; it must be a list of schemas such as "
            "{'type': 'function', 'function': {'name': …, 'parameters': …}}"
        )
    return list(tools)


def _components(values: Mapping[str, Any], who: str) -> dict[str, float]:
    """Return the components that the method `who` returned, as plain floats."""
    components = named(values, f"{who} returned components")
    if ENVIRONMENT in components:
        raise TypeError(
            f"{who} returned the component {ENVIRONMENT!r}, which is the name of the returned reward itself; give it "
            "another name"
        )
    return components


def _truth(value: Any, what: str) -> bool:
    truth = value.item() if hasattr(value, "item") else value  # numpy's and torch's booleans
    if not isinstance(truth, (bool, numbers.Integral)):
        raise TypeError(f"{what}={value!r}; it must be True or False")
    return bool(truth)


def as_messages(observation: Any) -> list[Message]:
    """Convert an observation to a list of messages.

    Text becomes one user message, a single message becomes a list of one, and None becomes an empty list. The messages
    are copies in plain JSON; long texts are cut (see `bounded`).

    Raises:
        TypeError: the observation has none of these forms, is too large, or has a role that does not exist.
    """
    if observation is None:
        return []
    if isinstance(observation, str):
        observation = {"role": "user", "content": observation}
    messages = [observation] if isinstance(observation, dict) else observation
    if not isinstance(messages, list | tuple):
        raise TypeError(
            f"the observation is {observation!r:.200}; it must be text, a message, a list of messages or None"
        )
    for message in messages:
        if not isinstance(message, dict) or "role" not in message or "content" not in message:
            raise TypeError(f"an observation holds {message!r:.200}; messages are dicts with role and content")
        if message["role"] not in ROLES:
            raise TypeError(
                f"an observation has the role {message['role']!r:.100}; it must be one of {', '.join(ROLES)}"
            )
    # Lone surrogates become question marks: neither a file nor a tokenizer accepts them.
    return json.loads(json.dumps(bounded(list(messages)), ensure_ascii=False).encode(errors="replace"))
