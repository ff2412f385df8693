"""Episodes whose turns, tokens and tools have long tails."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from mtrl.doctor.architecture import Architecture, find
from mtrl.trainer.flops import ModelFlops


@dataclass(frozen=True)
class Tail:
    """A lognormal distribution, cut at `most`."""

    mean: float
    """Mean before the cut."""
    sigma: float
    """Standard deviation of the logarithm; with 0 every value is the mean."""
    most: float = math.inf

    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """Return random values, [count] float64."""
        if not self.mean:
            return np.zeros(count)
        middle = math.log(self.mean) - self.sigma**2 / 2
        return np.minimum(np.exp(middle + self.sigma * rng.standard_normal(count)), self.most)


@dataclass(frozen=True)
class Turn:
    sampled: int
    observed: int
    """Number of tokens before the turn: those of the prompt, or of the observation."""
    tool_seconds: float
    """Seconds of the environment after the turn."""


@dataclass(frozen=True)
class Workload:
    name: str
    model: str
    """Name in `mtrl/doctor/architectures.yaml`."""
    tensor_parallel: int
    """Number of GPUs of one server."""
    per_gpu: int
    """Number of trajectories of a step per GPU."""
    turns: Tail
    """Number of turns of a trajectory."""
    sampled: Tail
    """Number of sampled tokens of a turn."""
    observed: Tail
    """Number of tokens between two turns."""
    prompt: int
    """Number of tokens of the prompt."""
    tool: Tail
    """Seconds of a step of the environment."""
    micro_batch: int
    """Value of `trainer.max_tokens_per_microbatch`."""
    group_size: int = 8

    def groups(self, gpus: int) -> int:
        """Return the number of groups of a step."""
        return max(1, self.per_gpu * gpus // self.group_size)

    def episode(self, seed: int, group: int, index: int) -> list[Turn]:
        """Return the turns of one trajectory, which depend only on the three numbers."""
        rng = np.random.default_rng([seed, group, index])
        count = max(1, round(float(self.turns.draw(rng, 1)[0])))
        sampled, observed, tool = (tail.draw(rng, count) for tail in (self.sampled, self.observed, self.tool))
        return [
            Turn(max(1, round(sampled[i])), round(observed[i]) if i else self.prompt, float(tool[i]))
            for i in range(count)
        ]

    def without_tail(self) -> Workload:
        """Return the workload with equal episodes, in which every quantity has its mean."""
        tails = {name: replace(getattr(self, name), sigma=0.0) for name in ("turns", "sampled", "observed", "tool")}
        return replace(self, **tails)

    def with_tails(self, factor: float) -> Workload:
        """Return the workload with the same means before the cut, and all sigmas multiplied by `factor`."""
        tails = {name: getattr(self, name) for name in ("turns", "sampled", "observed", "tool")}
        return replace(self, **{n: replace(tail, sigma=tail.sigma * factor) for n, tail in tails.items()})

    @cached_property
    def architecture(self) -> Architecture:
        return find(self.model)

    @property
    def flops(self) -> ModelFlops:
        """FLOPs of the model, counted as in `mtrl.trainer.flops`."""
        a = self.architecture
        body = a.num_hidden_layers * sum(inputs * outputs for inputs, outputs in a.linear.values())
        return ModelFlops(body, body, a.head, a.head, a.queries, (None,) * a.num_hidden_layers)


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload(
            "math",
            "Qwen/Qwen3-8B",
            tensor_parallel=1,
            per_gpu=16,
            turns=Tail(1, 0),
            sampled=Tail(3000, 0.9, 16000),
            observed=Tail(0, 0),
            prompt=200,
            tool=Tail(0, 0),
            micro_batch=16384,
        ),
        Workload(
            "tools",
            "Qwen/Qwen3-8B",
            tensor_parallel=1,
            per_gpu=16,
            turns=Tail(8, 0.5, 24),
            sampled=Tail(300, 0.8, 2048),
            observed=Tail(300, 0.8, 4096),
            prompt=1000,
            tool=Tail(1.0, 1.0, 60),
            micro_batch=16384,
        ),
        Workload(
            "swe",
            "Qwen/Qwen3-32B",
            tensor_parallel=4,
            per_gpu=4,
            turns=Tail(40, 0.5, 100),
            sampled=Tail(250, 0.8, 2048),
            observed=Tail(500, 0.9, 8192),
            prompt=3000,
            tool=Tail(5.0, 1.2, 300),
            micro_batch=65536,
        ),
    )
}
"""Workloads: long answers without tools; tools of about a second; and work in a repository, with trajectories as long
as published ones (31.6 thousand tokens, NeMo-RL on SWE)."""
