"""Checks of `rollouts.*`, the rollout workers. No check contacts Ray."""

from __future__ import annotations

import importlib.util

from omegaconf import DictConfig

from mtrl.config.derived import plays_agent, serves
from mtrl.errors import UserError, missing_extra


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
    if serves(cfg):
        raise UserError(
            f"{start} plays with an engine in each worker, and generator.backend={cfg.generator.backend} samples on "
            "servers, which only rank 0 can use; write generator=local, or rollouts.workers=0"
        )
    if plays_agent(cfg):
        raise UserError(
            f"{start} plays environments, and generator.agent names a program, which only rank 0 can run; leave "
            "generator.agent out, or write rollouts.workers=0"
        )
    if cfg.model.device.startswith("cuda") and not settings.gpus:
        raise UserError(
            f"model.device={cfg.model.device} needs a GPU in each worker too, and rollouts.gpus=0 gives it none; write "
            "rollouts.gpus=1, or model.device=auto"
        )
    if importlib.util.find_spec("ray") is None:
        raise missing_extra(f"ray, which {start} needs,", "ray")
    idle = "generator.local.process=true has no effect with rollouts.workers, whose engines run in the workers"
    return [idle] if cfg.generator.local.process else []
