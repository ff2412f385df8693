"""One episode: the model calls the tools of its case, and ends with an answer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from envs.sop.domains import row_tools
from envs.sop.reward import FORMAT_COEF, SCHEMES, SOPBenchReward, judge
from mtrl.environments.base import StepResult
from mtrl.environments.tools import ToolEnvironment
from mtrl.errors import UserError
from mtrl.types import Message, Row


class SopEnv(ToolEnvironment):
    """A turn with tool calls receives their results; a turn without calls ends the episode and receives the reward."""

    reward_schemes: ClassVar[tuple[str, ...]] = SCHEMES

    def __init__(self, max_turns: int = 8, reward: str = "default", format_coef: float = FORMAT_COEF, **config: Any):
        super().__init__(max_turns)  # the other keys of environment.config are for the loader
        if reward not in SCHEMES:
            raise UserError(f"reward.scheme={reward} is not known to sop; choose one of {', '.join(SCHEMES)}")
        if max_turns < 2:
            raise UserError(f"generator.max_turns={max_turns} leaves no turn to ask the tools; set it to 2 or more")
        self.scheme, self.format_coef = reward, SOPBenchReward(format_coef).format_coef

    def reset(self, row: Row | None = None) -> list[Message] | None:
        super().reset(row)
        self.toolbox = row_tools(row or {}, self.resources)
        return None

    def answer(self, response: str, ground_truth: dict[str, Any]) -> StepResult:
        return self._paid(StepResult(0.0, done=True), response, ground_truth)

    async def respond(self, message: Message, response: str, ground_truth: dict[str, Any]) -> StepResult:
        result: StepResult = await super().respond(message, response, ground_truth)
        # An episode out of turns gets the reward of an unreadable answer; otherwise giving no answer would be rewarded
        # more.
        return self._paid(result, "", ground_truth) if result.truncated else result

    def _paid(self, result: StepResult, response: str, ground_truth: dict[str, Any]) -> StepResult:
        verdict = judge(response, ground_truth)
        parts = verdict.components(self.scheme, self.format_coef)
        metrics = {**result.metrics, **verdict.metrics}
        return replace(result, reward=sum(parts.values()), components=parts, metrics=metrics)
