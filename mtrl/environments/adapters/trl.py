"""TRL: an `environment_factory` class, whose public methods are the model's tools.

Tools are the public methods except `reset`, `get_reward` and `close`; their types and docstrings define the schemas.
`reset(**row)` gets the columns of the row, and text that it returns is appended to the last user message. The episode
ends with the first turn that calls no tool, or at a limit of the run on turns or context. Its reward is then the result
of `get_reward()`, or the attribute `reward` of a class without that method.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

from mtrl.environments.adapters.base import EnvironmentAdapter, accepted, with_text
from mtrl.environments.base import StepResult
from mtrl.environments.tools import ToolEnvironment, tool, toolbox
from mtrl.types import Message, Row

NOT_TOOLS = frozenset({"reset", "get_reward", "close"})


class TRLAdapter(ToolEnvironment, EnvironmentAdapter):
    """One episode of a TRL environment."""

    def check_config(self) -> None:
        """
        Raises:
            UserError: the config does not fit the foreign class, or one of its tools has no types or no docstring.
        """
        super().check_config()
        if isinstance(self.foreign, type):
            toolbox(_marked(object.__new__(self.foreign)))

    def reset(self, row: Row | None = None) -> list[Message]:
        super().reset()
        row = row or {"prompt": []}
        env = self.make(**self.config)
        self.toolbox = toolbox(_marked(env))
        opening = env.reset(**accepted(env.reset, row))
        return with_text(row["prompt"], opening, separator="") if opening else list(row["prompt"])

    async def answer(self, response: str, ground_truth: dict[str, Any]) -> StepResult:  # type: ignore[override]
        return StepResult(await self._reward(), None, done=True)

    async def respond(self, message: Message, response: str, ground_truth: dict[str, Any]) -> Any:
        result = await super().respond(message, response, ground_truth)
        cut = result.done and result.truncated
        return replace(result, reward=await self._reward()) if cut else result

    async def truncate(self, ground_truth: dict[str, Any]) -> dict[str, float]:  # type: ignore[override]
        """Return the reward of an episode that a limit of the run cuts after a turn that did not end it."""
        return {"get_reward": await self._reward()}

    async def _reward(self) -> float:
        if callable(getattr(self.env, "get_reward", None)):
            reward = self.env.get_reward()
            return await reward if inspect.isawaitable(reward) else reward
        if isinstance(getattr(self.env, "reward", None), float | int):
            return self.env.reward
        raise TypeError(
            f"{type(self).__name__} has neither get_reward() nor a number as its attribute reward; "
            "define get_reward, which may return 0.0 where reward.components defines the reward"
        )


def _marked(env: Any) -> Any:
    """Mark the public methods of the object's class as tools, and return the object."""
    for name, function in inspect.getmembers(type(env), inspect.isfunction):
        if not name.startswith("_") and name not in NOT_TOOLS:
            tool(function)
    return env
