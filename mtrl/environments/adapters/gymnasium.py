"""Gymnasium: `reset(seed=…)` and `step(action)` with five results, or four in versions before 0.26.

A response is converted to an action as follows, unless `environment.config.parse_action` names a function
`(response, env) -> action` that raises `ValueError` for an unreadable response:

- no action space, or a `Text` space: the response itself;
- `Discrete`: an integer, alone in the response or in its last `<action>…</action>`;
- `Box`, `MultiDiscrete`, `MultiBinary`: a JSON array of numbers, in the same place; `MultiBinary` also takes true and
  false.

A response that is unreadable or not in the action space gets reward 0 and does not reach the environment. The
observation then describes the expected form, without the model's own text, which must not come back as the
environment's.

An observation is converted to text as follows, unless `environment.config.render_observation` names a function
`(observation, env) -> text or messages`: text and messages stay unchanged; with `render_mode: ansi` the text is the
result of `render()`; any other observation is written as JSON.

The seed is the row's `seed`, or is derived from its `id`; the row's `options` are passed to `reset` as well. Without
`data.path` the rows hold only seeds, and `environment.config.instruction` is the first text for the model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from mtrl.datasets import Splits
from mtrl.environments.adapters.base import (
    EnvironmentAdapter,
    accepted,
    action_text,
    is_messages,
    metrics_of,
    row_seed,
    seed_rows,
    with_text,
)
from mtrl.environments.base import StepResult
from mtrl.types import Message, Row
from mtrl.utils.strict_json import strict_loads
from mtrl.utils.user_code import load_function

ARRAYS = ("Box", "MultiDiscrete", "MultiBinary")


class RefusedActionError(Exception):
    """The foreign environment refused an action as invalid, and its state is unchanged."""


class Translator(EnvironmentAdapter):
    """Converts responses to actions and observations to text, for frameworks whose actions are not text."""

    own_keys = ("instruction", "parse_action", "render_observation")

    def __init__(self, max_turns: int = 5, **config: Any):
        """
        Raises:
            UserError: the config does not fit the foreign class, or names a function that cannot be imported.
        """
        super().__init__(max_turns, **config)
        self.parse_action = self._function("parse_action") or self.default_action
        self.render_observation = self._function("render_observation") or self.default_text

    def _function(self, key: str) -> Callable[..., Any] | None:
        return load_function(self.own[key], f"environment.config.{key}") if key in self.own else None

    def default_action(self, response: str, env: Any) -> Any:
        raise NotImplementedError

    def default_text(self, observation: Any, env: Any) -> Any:
        raise NotImplementedError

    def opening(self, row: Row, observation: Any) -> list[Message]:
        """Return the row's prompt, then the instruction, then the first observation."""
        messages = list(row.get("prompt") or [])
        if "instruction" in self.own:
            messages = with_text(messages, self.own["instruction"])
        shown = self.render_observation(observation, self.env)
        return [*messages, *shown] if is_messages(shown) else with_text(messages, shown)

    def step(self, response: str, ground_truth: dict[str, Any]) -> StepResult:
        self.current_turn += 1
        try:
            action = self.parse_action(response, self.env)
        except ValueError as error:
            return _invalid(error)
        try:
            result = self.act(action)
        except RefusedActionError as error:
            return _invalid(error)
        result.metrics = {**result.metrics, "invalid_action": 0.0}
        return result

    def act(self, action: Any) -> StepResult:
        """Pass the action to the foreign environment.

        Raises:
            RefusedActionError: the environment refuses the action, which only its server can check.
        """
        raise NotImplementedError

    @staticmethod
    def load(data: Any, seed: int = 0, **config: Any) -> Splits:
        """Return the rows of `data.path`, or rows of seeds if it is not set."""
        from mtrl.datasets import load_rows

        return seed_rows(data, seed) if data.path is None else load_rows(data, seed)


class GymnasiumAdapter(Translator):
    """One episode of a Gymnasium environment."""

    def reset(self, row: Row | None = None) -> list[Message]:
        super().reset()
        row = row or {"id": ""}
        env = self.make(**self.config)
        arguments = {"seed": row_seed(row), "options": row.get("options")}
        given = accepted(env.reset, arguments)
        if "seed" not in given and callable(getattr(env, "seed", None)):  # before version 0.26
            env.seed(arguments["seed"])
        started = env.reset(**given)
        observation = started[0] if _has_info(started) else started
        return self.opening(row, observation)

    def act(self, action: Any) -> StepResult:
        observation, reward, terminated, truncated, info = _five(self.env.step(action), type(self).__name__)
        return StepResult(
            reward,
            self.render_observation(observation, self.env),
            terminated or truncated,
            metrics=metrics_of(info),
            truncated=bool(truncated) and not terminated,
        )

    def default_action(self, response: str, env: Any) -> Any:
        space = getattr(env, "action_space", None)
        kinds = {cls.__name__ for cls in type(space).__mro__}
        if space is None:
            return response
        if "Text" in kinds:
            action: Any = response
        elif "Discrete" in kinds:
            action = _integer(action_text(response), space)
        elif kinds & set(ARRAYS):
            # The values of MultiBinary are truth values; those of the other spaces are numbers, which true is not.
            leaves = (int, float, bool) if "MultiBinary" in kinds else (int, float)
            action = _array(action_text(response), space, leaves)
        else:
            raise TypeError(
                f"{type(self).__name__} has the action space {space}; name a function (response, env) -> action "
                "in environment.config.parse_action"
            )
        if not space.contains(action):
            raise ValueError(f"it is not in {space}")
        return action

    def default_text(self, observation: Any, env: Any) -> Any:
        if isinstance(observation, str) or is_messages(observation):
            return observation
        if getattr(env, "render_mode", None) == "ansi":
            return env.render()
        return json.dumps(observation, default=_plain, ensure_ascii=False)


def _invalid(error: Exception) -> StepResult:
    return StepResult(0.0, f"Invalid action: {error}", metrics={"invalid_action": 1.0})


def _has_info(started: Any) -> bool:
    return isinstance(started, tuple) and len(started) == 2 and isinstance(started[1], dict)


def _five(result: Any, name: str) -> tuple[Any, Any, Any, Any, Any]:
    if isinstance(result, tuple) and len(result) == 5:
        return result
    if isinstance(result, tuple) and len(result) == 4:
        observation, reward, done, info = result
        cut = bool(done) and bool((info or {}).get("TimeLimit.truncated", False))
        return observation, reward, bool(done) and not cut, cut, info
    raise TypeError(
        f"{name}.step returned {result!r:.200}; it must return (observation, reward, terminated, truncated, info) "
        "or (observation, reward, done, info)"
    )


def _integer(text: str, space: Any) -> int:
    first = int(getattr(space, "start", 0))
    if not re.fullmatch(r"-?[0-9]{1,18}", text):
        raise ValueError(f"it is not an integer; write one from {first} to {first + int(space.n) - 1}")
    return int(text)


def _array(text: str, space: Any, leaves: tuple[type, ...]) -> Any:
    """Parse a JSON array whose values have one of the types `leaves`. A value that the space's dtype cannot hold is
    refused: numpy would convert 1.9, "1" and true to 1, and 1e99 to infinity."""
    import numpy

    is_integer = numpy.dtype(space.dtype).kind in "iu"
    try:
        values = numpy.asarray(strict_loads(text), dtype=object)
        with numpy.errstate(over="ignore"):
            action = values.astype(space.dtype)
        if any(type(value) not in leaves for value in values.flat):
            raise TypeError("a value is no number")
        if not numpy.isfinite(action).all() or (is_integer and not numpy.array_equal(action, values)):
            raise ValueError("a value does not fit the dtype")
    except (ValueError, TypeError, OverflowError) as error:
        expected = "integers" if is_integer else "numbers"
        raise ValueError(f"it is not a JSON array of {expected} of shape {space.shape}") from error
    return action


def _plain(value: Any) -> Any:
    """Convert numpy's arrays and scalars to lists and numbers, and any other value to its text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)
