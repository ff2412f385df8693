"""What the final answer is paid, field by field."""

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
    """Dense reward: the share of right fields, less `format_coef` where there is no answer.

    reward = field_acc + format_coef * (emitted - 1), with field_acc = matched / len(ground_truth), and emitted = 1 for
    an answer that can be read, else 0; so it lies between -format_coef and 1. An object with a field that nobody asked
    for is no answer.

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
        """Pay the last assistant message; returns the reward and the metrics completion and field_acc.

        Raises:
            UserError: the ground truth has no fields.
        """
        verdict = judge(last_answer(messages), ground_truth)
        return verdict.dense(self.format_coef), {"completion": verdict.completion, "field_acc": verdict.field_acc}


async def sop_bench_reward(
    messages: list[Message], row: Row, *, format_coef: float = FORMAT_COEF
) -> tuple[float, dict[str, float]]:
    """`SOPBenchReward` for `reward.components`: it also pays episodes that a limit of the run has cut."""
    return await SOPBenchReward(format_coef)(messages, row["ground_truth"])


@dataclass(frozen=True)
class Verdict:
    """Which fields are right."""

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
        """Parts of the reward, which is their sum. `default` pays 1.0 for all fields and nothing for some of them;
        `dense` pays the share of right fields. Both take `format_coef` off where there is no answer."""
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
    """Text of the last assistant message; empty where there is none, or where it calls tools."""
    last = next((message for message in reversed(messages) if message.get("role") == "assistant"), {})
    content = last.get("content")
    return content if isinstance(content, str) and not last.get("tool_calls") else ""
