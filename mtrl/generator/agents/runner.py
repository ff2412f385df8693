"""What starts a program for one episode, and what comes of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from mtrl.plain_numbers import LARGEST_METRIC, finite, named
from mtrl.types import Row


class AgentError(RuntimeError):
    """A program did not play its episode to the end, or says so itself."""


@dataclass(frozen=True)
class Assignment:
    """One episode, as the program is told of it."""

    row: Row
    base_url: str
    """Where the policy answers, up to and with `/v1`; whoever has it may ask in the name of this trajectory."""
    api_key: str
    """The trajectory's token."""
    model: str
    trajectory_id: str
    temperature: float
    top_p: float
    max_tokens: int
    feedback_url: str
    """Where `/update-reward` and `/complete-rollout` are."""


@dataclass(frozen=True)
class Outcome:
    """What a program returned."""

    rewards: float | list[float] | None = None
    """One for the whole episode, or one for each call of the model; None: it has reported them, or will."""
    metrics: dict[str, float] = field(default_factory=dict)
    error: str | None = None
    """What went wrong, if the program says that something did."""


class Runner(Protocol):
    """Starts programs, several at once."""

    plays_on: bool
    """Whether the program may go on after `run` has returned None: it has ended when it reports so."""

    async def run(self, assignment: Assignment) -> Outcome | None:
        """One episode. When this returns, raises or is cancelled, nothing of the program runs on this machine.

        Raises:
            AgentError: the program failed; anything else that it raises itself.
        """

    async def close(self) -> None:
        """Give everything back."""


def as_outcome(value: Any, what: str) -> Outcome | None:
    """Read what a program returned: None, a number, a list of numbers, or `{"reward": …, "metrics": {…}}`.

    Args:
        what: the program, in errors.

    Raises:
        TypeError: it is none of these, or a number is not finite.
    """
    if value is None or isinstance(value, Outcome):
        return value
    if not isinstance(value, Mapping):
        return Outcome(_rewards(value, what))
    reward, metrics, error = value.get("reward", value.get("rewards")), value.get("metrics") or {}, None
    if value.get("status") in ("error", "failed"):
        error = str(value.get("error") or value.get("message") or "the program says that it failed")
    if not isinstance(metrics, Mapping):
        raise TypeError(f"{what} returned the metrics {metrics!r:.200}; they must be numbers by name")
    numbers = named(metrics, f"{what} returned metrics", LARGEST_METRIC)
    return Outcome(None if reward is None else _rewards(reward, what), numbers, error)


def _rewards(value: Any, what: str) -> float | list[float]:
    plain = value.tolist() if hasattr(value, "tolist") else value  # numpy's and torch's
    if isinstance(plain, list | tuple):
        return [finite(number, f"{what} returned the rewards {plain!r:.200}, with") for number in plain]
    if isinstance(plain, str | bytes) or not hasattr(plain, "__float__"):
        raise TypeError(f"{what} returned {value!r:.200}; it must return None, a number, a list of numbers or a dict")
    return finite(plain, f"{what} returned the reward")
