"""OpenEnv: an `Environment` in this process, or an `EnvClient` of an environment that runs elsewhere.

`environment.config` holds the arguments of the class (for a client: `base_url`). The seed is the row's `seed`, or
is derived from its `id`; the row's `reset`, a mapping, is passed to `reset` as well (`{"split": "train", "index": 3}`).
The observation carries the reward and the end of the episode; a reward of None counts as 0.

The action's class comes from the annotation of `step` or of the base class. An action of one text field gets the
response; any other action is read from a JSON object of its fields, which is the whole response or its last
`<action>…</action>`. An observation of one text field becomes that text, and any other becomes JSON.
`environment.config.parse_action`, `render_observation` and `instruction` change this, as they do for Gymnasium.
"""

from __future__ import annotations

import json
import typing
from collections.abc import Mapping
from typing import Any

from mtrl.environments.adapters.base import accepted, action_text, metrics_of, row_seed
from mtrl.environments.adapters.gymnasium import RefusedActionError, Translator
from mtrl.environments.base import StepResult
from mtrl.types import Message, Row
from mtrl.utils.strict_json import strict_loads

CARRIED = frozenset({"done", "reward", "metadata"})
"""Fields that every observation has in addition to its own; every action has `metadata` too."""
REFUSED = "(code: VALIDATION_ERROR)"
"""The end of a client's error if the server refuses an action whose fields are not those of its class. A client
without classes, such as `GenericEnvClient`, sends every JSON object."""


class OpenEnvAdapter(Translator):
    """One episode of an OpenEnv environment."""

    def reset(self, row: Row | None = None) -> list[Message]:
        super().reset()
        row = row or {"id": ""}
        env = self.make(**self.config)
        return self.opening(row, observation_of(start(env, row)))

    def opened(self, env: Any) -> Any:
        return blocking(env)

    def act(self, action: Any) -> StepResult:
        try:
            result = self.env.step(action)
        except RuntimeError as error:
            if not str(error).endswith(REFUSED):
                raise
            raise RefusedActionError("write a JSON object with the fields of the action") from error
        return StepResult(
            0.0 if result.reward is None else result.reward,
            self.render_observation(observation_of(result), self.env),
            result.done,
            metrics=metrics_of(metadata_of(result)),
        )

    def default_action(self, response: str, env: Any) -> Any:
        kind = action_class(type(self).foreign)
        fields = [name for name in getattr(kind, "model_fields", ()) if name not in CARRIED]
        if len(fields) == 1 and kind.model_fields[fields[0]].annotation is str:
            return kind(**{fields[0]: response})
        expected = f"write a JSON object with {', '.join(fields) or 'the fields of the action'}"
        try:
            value = strict_loads(action_text(response))
        except ValueError:
            raise ValueError(expected) from None
        if not isinstance(value, dict) or CARRIED & value.keys():
            raise ValueError(expected)
        return _validated(kind, value, expected) if fields else value

    def default_text(self, observation: Any, env: Any) -> Any:
        return observation_text(observation)


def start(env: Any, row: Row) -> Any:
    """Reset an environment or a client with the row's seed and its `reset`, and return what it returns."""
    return env.reset(**accepted(env.reset, {"seed": row_seed(row), **(row.get("reset") or {})}))


def blocking(env: Any) -> Any:
    """Return a client's blocking wrapper, in which a separate thread talks to the server, and an environment itself."""
    return env.sync() if callable(getattr(env, "sync", None)) else env


def observation_of(result: Any) -> Any:
    """Return the observation of a result. A client wraps it in its own result type, which is not a pydantic model."""
    return result.observation if not hasattr(result, "model_dump") and hasattr(result, "observation") else result


def metadata_of(result: Any) -> Any:
    """Return the metadata of a result or of its observation."""
    return getattr(result, "metadata", None) or getattr(observation_of(result), "metadata", None)


def observation_text(observation: Any) -> str:
    """Return the only field of an observation if it is a text, and otherwise all of its own fields as JSON."""
    dump = getattr(observation, "model_dump", None)
    shown = dump(mode="json") if dump else observation
    if not isinstance(shown, Mapping):
        return str(shown)
    shown = {name: value for name, value in shown.items() if name not in CARRIED}
    if len(shown) == 1 and isinstance(text := next(iter(shown.values())), str):
        return text
    return json.dumps(shown, ensure_ascii=False, default=str)


def action_class(foreign: Any) -> Any:
    """Return the class of the actions: the annotation of `step`, or the first argument of the generic base class; else
    None."""
    try:
        hinted = typing.get_type_hints(foreign.step).get("action")
    except (NameError, TypeError, AttributeError):  # a name that exists only for the type checker
        hinted = None
    if fields_of(hinted):
        return hinted
    for cls in getattr(foreign, "__mro__", ()):
        for base in getattr(cls, "__orig_bases__", ()):
            arguments = typing.get_args(base)
            if arguments and fields_of(arguments[0]):
                return arguments[0]
    return None


def fields_of(kind: Any) -> bool:
    return bool(getattr(kind, "model_fields", {}).keys() - CARRIED)


def _validated(kind: Any, value: dict[str, Any], expected: str) -> Any:
    try:
        return kind.model_validate(value)
    except ValueError as error:
        # Only existing fields are named: the model's own text must not come back as the environment's.
        found = [
            problem
            for problem in getattr(error, "errors", list)()
            if set(problem["loc"][:1]) <= kind.model_fields.keys()
        ]
        problems = "; ".join(f"{'.'.join(map(str, problem['loc'][:1]))}: {problem['msg']}" for problem in found)
        raise ValueError(problems or expected) from error
