"""One episode of a word problem."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any, ClassVar

from envs.gsm8k import prompts
from envs.gsm8k.calculator import CalculatorError, calculate
from envs.gsm8k.reward import SCHEMES, TurnReward, parse_answer, parse_number
from mtrl.environments.base import BaseEnvironment, StepResult
from mtrl.errors import UserError
from mtrl.types import Message, Row

_CALC = re.compile(r"<calc>(.*?)</calc>", re.DOTALL)


class Gsm8kEnv(BaseEnvironment):
    """In each turn the model reasons and answers `#### number`; a wrong answer gets feedback and another turn.

    With `calculator=True` the environment answers a message with one `<calc>expression</calc>` and no `####` with the
    value. The call uses up a turn and has no reward of its own.
    """

    reward_schemes: ClassVar[tuple[str, ...]] = SCHEMES

    def __init__(self, max_turns: int = 5, reward: str = "default", calculator: bool = False, **config: Any):
        super().__init__(max_turns)  # the other keys of environment.config are for the loader
        if max_turns < 1:
            raise UserError(f"generator.max_turns={max_turns} leaves no turn to answer; set it to 1 or more")
        if not isinstance(calculator, bool):  # Hydra reads no and off as text, which is true
            meant = "true" if calculator in ("yes", "on", 1) else "false"
            raise UserError(
                f"environment.config.calculator={calculator!r} must be true or false; write "
                f"environment.config.calculator={meant}"
            )
        if calculator and max_turns < 2:
            raise UserError(
                "environment.config.calculator=true needs a turn to compute and one to answer; set generator.max_turns "
                "to 2 or more, or calculator=false"
            )
        self.scheme = reward
        self.calculator = calculator
        self.reset()

    def reset(self, row: Row | None = None) -> list[Message] | None:
        super().reset(row)
        self.reward = TurnReward(self.scheme, self.max_turns)
        self.short = bool(row) and row.get("source") == "synthetic" and row.get("style") != "full"
        return self._single_turn_opening(row) if row and self.max_turns == 1 else None

    def _single_turn_opening(self, row: Row) -> list[Message] | None:
        """Return the single-turn prompt; None if the row has a prompt of its own. The loader does not know `max_turns`
        and always writes the multi-turn prompt, so only that prompt is replaced."""
        question = row.get("question", "")
        if row.get("prompt") != prompts.opening(question, multi_turn=True, calculator=False):
            return None
        return prompts.opening(question, multi_turn=False, calculator=False)

    def step(self, response: str, ground_truth: dict[str, Any]) -> StepResult:
        self.current_turn += 1
        if self.calculator and "####" not in response and "<calc>" in response:
            return self._calculate(response)
        return self._grade(response, ground_truth)

    def _calculate(self, response: str) -> StepResult:
        # Text after the last </calc> is left out, because a search in it would take quadratic time for many <calc>.
        expressions = _CALC.findall(response[: response.rfind("</calc>") + len("</calc>")])
        failed = False
        try:
            if len(expressions) != 1:
                raise CalculatorError("write one <calc>expression</calc>")
            observation = calculate(expressions[0])
        except CalculatorError as error:
            failed, observation = True, f"error: {error}"
        return self._result({"correct": 0.0, "format": 0.0}, observation, calc_calls=1.0, calc_errors=float(failed))

    def _grade(self, response: str, ground_truth: dict[str, Any]) -> StepResult:
        answer, truth = parse_answer(response), _truth(ground_truth)
        observation = prompts.feedback(self.short, answer is not None, self.max_turns - self.current_turn)
        components = self.reward.components(answer, truth)
        answered = answer is not None
        return self._result(components, observation, answer == truth, answered, malformed=float(not answered))

    def _result(
        self,
        components: dict[str, float],
        observation: str,
        solved: bool = False,
        answered: bool = False,
        **metrics: float,
    ) -> StepResult:
        done = solved or self.current_turn >= self.max_turns
        return StepResult(
            reward=sum(components.values()),
            observation=None if done else observation,
            done=done,
            truncated=done and not answered,
            components=components,
            metrics={"calc_calls": 0.0, "calc_errors": 0.0, "malformed": 0.0, **metrics},
        )


def _truth(ground_truth: dict[str, Any]) -> Decimal:
    number = parse_number(str(ground_truth.get("answer", "")))
    if number is None:
        raise UserError(
            f"ground_truth={ground_truth} of a gsm8k row has no number under 'answer'; write {{'answer': '72'}}"
        )
    return number
