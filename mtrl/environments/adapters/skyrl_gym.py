"""SkyRL-Gym: `BaseTextEnv`, called as SkyRL's generator calls it.

The class is made with `env_config` (the keys of `environment.config`) and `extras` (every column of the row but the
prompt, and `max_turns`, which is `generator.max_turns`). `init(prompt)` returns the opening messages, and `step`
returns the reward of its turn. Numbers in `metadata` become metrics, and so do those of `get_metrics()` after the last
turn.
"""

from __future__ import annotations

import inspect
import logging
from typing import Any

from omegaconf import OmegaConf

from mtrl.environments.adapters.base import EnvironmentAdapter, metrics_of
from mtrl.environments.base import StepResult
from mtrl.types import Message, Row

log = logging.getLogger(__name__)


class SkyRLGymAdapter(EnvironmentAdapter):
    """One episode of a `BaseTextEnv`."""

    def check_config(self) -> None:
        """Check nothing: `env_config` takes any key. `skyrl_gym.make` takes the name of its environment as `id`."""

    def reset(self, row: Row | None = None) -> list[Message]:
        super().reset()
        row = row or {"prompt": []}
        config = dict(self.config)
        named = (
            {"id": config.pop("id")} if "id" in inspect.signature(self.foreign).parameters and "id" in config else {}
        )
        extras = {**{name: value for name, value in row.items() if name != "prompt"}, "max_turns": self.max_turns}
        env = self.make(**named, env_config=OmegaConf.create(config), extras=extras)
        opening, _ = env.init(row["prompt"])
        return opening

    def step(self, response: str, ground_truth: dict[str, Any]) -> StepResult:
        self.current_turn += 1
        output = self.env.step(response)
        done = output["done"]
        metrics = metrics_of(output.get("metadata"))
        replaced = output.get("postprocessed_action")
        if replaced is not None and replaced != response:
            # The sampled tokens are the ones that are trained, so the episode continues from them.
            metrics["postprocessed_action"] = 1.0
            log.debug("%s replaced its action by %.80r; the sampled tokens stay", type(self).__name__, replaced)
        if done or self.current_turn >= self.max_turns:
            metrics |= metrics_of(self.env.get_metrics())
        reward = output["reward"]
        return StepResult(0.0 if reward is None else reward, output["observations"] or None, done, metrics=metrics)
