"""The reward of the final answer, field by field."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from envs.sop.output import matches, parse_final_output
from mtrl.errors import UserError
from mtrl.types import Message, Row

SCHEMES = ("default", "dense")
FORMAT_COEF = 0.1


@dataclass(frozen=True)
class SOPBenchReward:
    """Dense reward: the share of right fields, minus `format_coef` if there is no answer.

    reward = field_acc + format_coef * (emitted - 1), with field_acc = matched / len(ground_truth), and emitted = 1 for
    a readable answer, else 0. The reward lies between -format_coef and 1. An object with an additional field is no
    answer.

    Example::

        reward, metrics = await SOPBenchReward()(messages, {"aircraft_ready": "yes"})

    Source: the SageMaker AI guide on multi-turn reinforcement learning (summer 2026), `SOPBenchReward`.
    """

    format_coef: float = FORMAT_COEF

    def __post_init__(self) -> None:
        coef = self.format_coef
        if isinstance(coef, bool) or not isinstance(coef, int | float) or not 0 <= coef <= 1 or not math.isfinite(coef):
            raise UserError(f"environment.config.format_coef={coef!r} must be a number from 0 to 1")

    async def __call__(self, messages: list[Message], ground_truth: dict[str, Any]) -> tuple[float, dict[str, float]]:
        """Return the reward of the last assistant message, and the metrics completion and field_acc.

        Raises:
            UserError: the ground truth has no fields.
        """
        verdict = judge(last_answer(messages), ground_truth)
        return verdict.dense(self.format_coef), {"completion": verdict.completion, "field_acc": verdict.field_acc}


async def sop_bench_reward(
    messages: list[Message], row: Row, *, format_coef: float = FORMAT_COEF
) -> tuple[float, dict[str, float]]:
    """`SOPBenchReward` for `reward.components`, which also rewards episodes that a limit of the run has ended."""
    return await SOPBenchReward(format_coef)(messages, row["ground_truth"])


@dataclass(frozen=True)
class Verdict:
    """Whether there is an answer, and which of its fields are right."""

    emitted: bool
    right: dict[str, bool]

    @property
    def completion(self) -> float:
        return float(self.emitted)

    @property
    def field_acc(self) -> float:
        return sum(self.right.values()) / len(self.right)

    def dense(self, format_coef: float) -> float:
        return self.field_acc + format_coef * (self.completion - 1)

    def components(self, scheme: str, format_coef: float) -> dict[str, float]:
        """Return the components of the reward, which is their sum. `default` gives 1.0 if all fields are right, else
        0.0; `dense` gives the share of right fields. Both subtract `format_coef` if there is no answer."""
        fields = self.field_acc if scheme == "dense" else float(all(self.right.values()))
        return {"fields": fields, "format": format_coef * (self.completion - 1)}

    @property
    def metrics(self) -> dict[str, float]:
        fields = {f"field/{name}": float(right) for name, right in self.right.items()}
        return {"completion": self.completion, "field_acc": self.field_acc, **fields}


def judge(response: str, ground_truth: dict[str, Any]) -> Verdict:
    """Compare the answer in a response with the ground truth.

    Raises:
        UserError: the ground truth has no fields.
    """
    if not ground_truth:
        raise UserError("ground_truth={} has no fields; give each field of the final output its right value")
    fields = parse_final_output(response)
    if fields is None or not fields.keys() <= ground_truth.keys():
        return Verdict(False, dict.fromkeys(ground_truth, False))
    return Verdict(True, {name: matches(fields, name, wanted) for name, wanted in ground_truth.items()})


def last_answer(messages: list[Message]) -> str:
    """Return the text of the last assistant message; empty if there is no such message, or if it calls tools."""
    last = next((message for message in reversed(messages) if message.get("role") == "assistant"), {})
    content = last.get("content")
    return content if isinstance(content, str) and not last.get("tool_calls") else ""
