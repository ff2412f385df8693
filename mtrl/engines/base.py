"""The engine protocol: an engine takes a context and returns sampled token ids, their log-probs, a finish reason and
policy versions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from mtrl.errors import RunEndedError
from mtrl.types import Generation


class EngineLostError(RunEndedError):
    """The engine is lost and cannot sample again, so that neither a retry nor another episode can succeed."""


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of one turn. `temperature` 0 is greedy."""

    max_generate_length: int = 1024
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0
    """Seed of the random stream of one trajectory. A token depends on the seed, its position and the distribution, not
    on which other trajectories are in the batch."""


@dataclass(frozen=True)
class ImagePrompt:
    """The whole context of a turn, with images."""

    ids: list[int]
    """Token ids; each image has one placeholder for each of its tokens."""
    images: tuple[tuple[int, str], ...]
    """Index of the first placeholder of each image, and the image as in its message, in order."""


@dataclass
class EngineStats:
    """Totals since the engine was created."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    sampled_tokens: int = 0
    extra: dict[str, float] = field(default_factory=dict)

    def __add__(self, other: EngineStats) -> EngineStats:
        """Return the sums of two statistics; those of `extra` key by key, zeros too."""
        sums = {name: self.extra.get(name, 0.0) + other.extra.get(name, 0.0) for name in {**self.extra, **other.extra}}
        return EngineStats(
            self.prompt_tokens + other.prompt_tokens,
            self.cached_tokens + other.cached_tokens,
            self.sampled_tokens + other.sampled_tokens,
            sums,
        )


class TurnSampler(Protocol):
    """The part of an engine that samples turns."""

    async def generate(self, trajectory_id: str, prompt: Any, sampling: SamplingParams) -> Generation:
        """Sample one turn after `prompt`.

        Args:
            prompt: the whole context as its conversation gives it: token ids where mtrl holds the weights (an
                `ImagePrompt` with images), messages where the model is behind an endpoint.
        """


class Engine(TurnSampler, Protocol):
    """Protocol that every backend implements."""

    version: int
    """Policy version of the weights in use."""
    stats: EngineStats

    def open(self, trajectory_id: str) -> None:
        """Announce a trajectory before its first `generate`, so that an engine can plan its batch."""

    def release(self, trajectory_id: str) -> None:
        """End a trajectory: abort the turn that it still generates, and free its cache."""

    async def load_weights(self, weights: Any, version: int) -> None:
        """Use these weights as policy `version` from now on. It may be called while turns are sampled.

        Args:
            weights: tensors on the CPU by the names of the module's `state_dict`, tied ones once (with LoRA only the
                adapters' tensors). The caller may change them afterwards. None where engine and trainer share the
                module.
            version: number of policy updates that these weights have received.
        """

    async def close(self) -> None:
        """Stop the engine and everything that it runs."""
