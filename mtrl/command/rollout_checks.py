"""Checks of `rollouts.*`, the rollout workers. No check contacts Ray."""

from __future__ import annotations

import importlib.util
import math
from typing import Any

from omegaconf import DictConfig

from mtrl.config.derived import runs_agent, serves
from mtrl.errors import UserError, missing_extra
from mtrl.rollout.resources import byte_count
from mtrl.utils.gpus import visible_gpus

ELSEWHERE = {
    "CPU": "environment.resources.cpu",
    "GPU": "rollouts.gpus",
    "memory": "environment.resources.memory",
    "object_store_memory": "no key, since mtrl reserves it",
}
"""Ray's own resources, which `environment.resources.custom` may not contain, and the key of each."""


def check_resources(cfg: DictConfig) -> list[str]:
    """Check the resources that the environments of a worker need. Return warnings.

    Raises:
        UserError: the size of the memory or an amount cannot be read.
    """
    resources, path = cfg.environment.resources, "environment.resources"
    if resources.memory is not None:
        try:
            byte_count(resources.memory)
        except ValueError as error:
            raise UserError(f"{path}.memory={error}") from None
    for name, amount in resources.custom.items():
        setting = f"{path}.custom.{name}={amount}"
        if name in ELSEWHERE:
            raise UserError(f"{setting} is a resource that Ray has by itself; its key is {ELSEWHERE[name]}")
        if not _is_amount(amount):
            raise UserError(f"{setting} must be a number of at least 0.0001, the smallest amount of a resource of Ray")
    is_set = resources.cpu or resources.memory or resources.custom
    return [f"{path} has no effect with rollouts.workers=0"] if is_set and not cfg.rollouts.workers else []


def _is_amount(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 1e-4 <= value < math.inf


def check_rollouts(cfg: DictConfig) -> list[str]:
    """Check the settings of rollout workers. Return warnings.

    Raises:
        UserError: the settings cannot work, or Ray is not installed.
    """
    settings, count = cfg.rollouts, cfg.rollouts.workers
    if not count:
        changed = [
            key for key, default in (("cpus", 1.0), ("gpus", 0.0), ("timeout", 600.0)) if settings[key] != default
        ]
        return [f"rollouts.{key} has no effect with rollouts.workers=0" for key in changed]
    start = f"rollouts.workers={count}"
    if runs_agent(cfg):
        raise UserError(
            f"{start} runs environments, and generator.agent names a program, which only rank 0 can run; leave "
            "generator.agent out, or write rollouts.workers=0"
        )
    if cfg.model.device.startswith("cuda") and not settings.gpus and not serves(cfg):
        raise UserError(
            f"model.device={cfg.model.device} needs a GPU in each worker too, and rollouts.gpus=0 gives it none; write "
            "rollouts.gpus=1, or model.device=auto"
        )
    if importlib.util.find_spec("ray") is None:
        raise missing_extra(f"ray, which {start} needs,", "ray")
    if serves(cfg):
        return []
    local = cfg.generator.local
    idle = ["process=true"] if local.process else []
    idle += [f"replicas={local.replicas}"] if local.replicas else []
    return [
        f"generator.local.{setting} has no effect with rollouts.workers, whose engines run in the workers"
        for setting in idle
    ]


def check_local_replicas(cfg: DictConfig) -> list[str]:
    """Check the replicas of the embedded engine. Return warnings; there are none.

    Raises:
        UserError: the replicas contradict `generator.local.process`, or there are more than GPUs.
    """
    replicas = cfg.generator.local.replicas or 1
    if serves(cfg) or cfg.rollouts.workers or replicas == 1:
        return []
    setting = f"generator.local.replicas={replicas}"
    if cfg.generator.local.process is False:
        raise UserError(
            f"{setting} runs in processes, and generator.local.process=false allows none; leave "
            "generator.local.process out, or write generator.local.replicas=1"
        )
    gpus = 0 if cfg.model.device == "cpu" else visible_gpus()
    if gpus and replicas > gpus:
        raise UserError(
            f"{setting} needs a GPU for each replica, and this machine shows {gpus}; write "
            f"generator.local.replicas={gpus}, or model.device=cpu"
        )
    return []
