"""Keys that say where and when episodes run, beside updates and in which processes, and what they do with a long
context."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mtrl.config.field import number, one_of


@dataclass
class AsyncConfig:
    """Overlap of rollouts and updates."""

    max_steps_off_policy: int = number(0, at_least=0)
    """Maximum staleness of a token, in training steps: the number of steps by which the weights that train on it may be
    newer than the weights that sampled it; 0: rollouts and updates alternate."""
    on_stale: str = one_of("wait", "requeue")
    """Treatment of a group that would become too stale. wait: the next update waits for the group | requeue: the group
    is dropped, and its prompt is sampled again"""
    in_flight: str = one_of("continue", "drain")
    """Effect of new weights on turns that are being sampled. continue: sampling continues with the new weights | drain:
    the turns are finished before the weights change"""
    max_concurrent_groups: int | None = number(None, at_least=1)
    """Maximum number of groups whose episodes run at once; null: as many as max_steps_off_policy allows."""


@dataclass
class ContextConfig:
    """Folding of a conversation that becomes long, before it reaches `max_context_length`, which ends the episode."""

    fold: str = one_of("none", "keep_last", "summarise")
    """none | keep_last: the text of all observations but the last ones is replaced by a short text | summarise: the
    policy writes a summary, which replaces everything after the prompt"""
    threshold: int | None = number(None, at_least=1)
    """Number of tokens of a turn's context from which the conversation is folded before the turn. Null: the limit of
    the context less two turns of sampling_params.max_generate_length, and at least half of the limit."""
    keep_observations: int = number(3, at_least=1)
    """keep_last: number of observations, counted from the last one, that keep their text; the prompt is none of
    them."""


@dataclass
class ResourcesConfig:
    """Resources that Ray reserves for each rollout worker, in addition to `rollouts.cpus` and `rollouts.gpus`, for all
    environments that the worker has open at once. A reservation decides on which machine a worker starts, and limits
    nothing. Without rollout workers it has no effect."""

    cpu: float = number(0.0, at_least=0, at_most=1024)
    """Number of CPUs."""
    memory: str | None = None
    """Memory, as a number and a unit, such as 2GiB; null: none is reserved."""
    custom: dict[str, Any] = field(default_factory=dict)
    """Amounts of resources that the machines of a cluster offer by name (`ray start --resources`), such as
    {license: 1}."""


@dataclass
class RolloutsConfig:
    """Rollout workers: processes that play the episodes of training and of its evaluations, on one machine or many. Ray
    runs them (extra `ray`): the cluster of `RAY_ADDRESS` or of `ray start`, or else one that the run starts on this
    machine."""

    workers: int = number(0, at_least=0, at_most=1024)
    """Number of rollout workers, each with its own environments, and with its own local engine unless servers sample
    the turns; 0: rank 0 runs all episodes."""
    cpus: float = number(1.0, at_least=0)
    """Number of CPUs that Ray reserves for a worker."""
    gpus: float = number(0.0, at_least=0)
    """Number of GPUs that Ray reserves for a worker; 0: its engine runs on CPUs."""
    timeout: float = number(600.0, above=0)
    """Time limit of a worker's start, of loading weights and of any other answer, in seconds; a worker that exceeds it
    is replaced."""
