"""The interface that starts a program for one episode, and the outcome of the program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from mtrl.types import Row
from mtrl.utils.plain_numbers import LARGEST_METRIC, finite, named


class AgentError(RuntimeError):
    """A program did not run its episode to the end, or reported that it failed."""


@dataclass(frozen=True)
class Assignment:
    """Description of one episode that a program receives."""

    row: Row
    base_url: str
    """Address of the policy, up to and including `/v1`. A client that has it can make requests for this trajectory."""
    api_key: str
    """The trajectory's token."""
    model: str
    trajectory_id: str
    temperature: float
    top_p: float
    max_tokens: int
    feedback_url: str
    """Base address of `/update-reward` and `/complete-rollout`."""


@dataclass(frozen=True)
class ProgramResult:
    """Result that a program returned."""

    rewards: float | list[float] | None = None
    """Reward of the whole episode, or one reward per call of the model; None if the program reports them by HTTP."""
    metrics: dict[str, float] = field(default_factory=dict)
    error: str | None = None
    """Error message, if the program reported a failure."""


class AgentRunner(Protocol):
    """Starts programs, several at once."""

    ends_by_report: bool
    """Whether an episode for which `run` returned None continues until the program reports its end."""

    async def run(self, assignment: Assignment) -> ProgramResult | None:
        """Run one episode. When this returns, raises or is cancelled, no process of the program runs on this machine.

        Raises:
            AgentError: the program failed. Exceptions of the program itself pass through.
        """

    async def close(self) -> None:
        """Release all resources."""


def as_outcome(value: Any, what: str) -> ProgramResult | None:
    """Convert the value that a program returned: None, a number, a list of numbers, or `{"reward": …, "metrics": {…}}`.

    Args:
        what: name of the program in error messages.

    Raises:
        TypeError: the value has none of these forms, or a number is not finite.
    """
    if value is None or isinstance(value, ProgramResult):
        return value
    if not isinstance(value, Mapping):
        return ProgramResult(_rewards(value, what))
    reward, metrics, error = value.get("reward"), value.get("metrics") or {}, None
    reward = value.get("rewards") if reward is None else reward
    if value.get("status") in ("error", "failed"):
        error = str(value.get("error") or value.get("message") or "the program reported that it failed")
    if not isinstance(metrics, Mapping):
        raise TypeError(f"{what} returned the metrics {metrics!r:.200}; they must be numbers by name")
    numbers = named(metrics, f"{what} returned metrics", LARGEST_METRIC)
    return ProgramResult(None if reward is None else _rewards(reward, what), numbers, error)


def _rewards(value: Any, what: str) -> float | list[float]:
    plain = value.tolist() if hasattr(value, "tolist") else value  # numpy's and torch's
    if isinstance(plain, list | tuple):
        return [finite(number, f"{what} returned the rewards {plain!r:.200}, with") for number in plain]
    if isinstance(plain, str | bytes) or not hasattr(plain, "__float__"):
        raise TypeError(f"{what} returned {value!r:.200}; it must return None, a number, a list of numbers or a dict")
    return finite(plain, f"{what} returned the reward")
