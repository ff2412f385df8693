"""Checks of what makes a run large or lets it overlap: `async_config.*`, `trainer.fsdp.*`, ranks."""

from __future__ import annotations

import math
import os

from omegaconf import DictConfig

from mtrl.config.schema import Config
from mtrl.errors import UserError


def ranks() -> int:
    """How many processes `torchrun` has started for this job."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_sharded(cfg: DictConfig) -> bool:
    """Whether models are sharded: over ranks, or on one for the sake of its settings."""
    return ranks() > 1 or cfg.trainer.fsdp.param_dtype is not None or bool(cfg.trainer.fsdp.cpu_offload)


def overlaps(cfg: DictConfig | Config) -> bool:
    """Whether turns are sampled while the policy learns."""
    return cfg.async_config.max_steps_off_policy > 0


def serves(cfg: DictConfig | Config) -> bool:
    """Whether turns are sampled by servers, each with weights of its own."""
    return cfg.generator.backend != "local"


def is_deterministic(cfg: DictConfig | Config) -> bool:
    """Whether turns wait for each other, so that who shares a batch does not depend on time."""
    chosen = cfg.generator.local.deterministic
    return not serves(cfg) and (not overlaps(cfg) if chosen is None else bool(chosen))


def check_scale(cfg: DictConfig) -> None:
    """
    Raises:
        UserError: settings that contradict each other.
    """
    name = cfg.placement.name
    if name is not None and name not in cfg.model.recipe:
        raise UserError(
            f"placement={name} takes its numbers from the model's own table, and model.path={cfg.model.path} has none "
            "for it; choose one of conf/model that has, such as model=qwen3_8b, or leave placement out"
        )
    if not math.isfinite(cfg.placement.gpu_memory):
        raise UserError(
            f"placement.gpu_memory={cfg.placement.gpu_memory} is no size; write the GiB of a GPU, such as 79"
        )
    if overlaps(cfg) and cfg.generator.local.deterministic and not serves(cfg):
        raise UserError(
            "generator.local.deterministic=true lets turns wait for each other, and async_config.max_steps_off_policy="
            f"{cfg.async_config.max_steps_off_policy} lets nothing wait; set generator.local.deterministic=null, or "
            "async_config.max_steps_off_policy=0"
        )
    replicas = cfg.trainer.fsdp.replicas
    if ranks() % replicas:
        raise UserError(
            f"trainer.fsdp.replicas={replicas} does not divide the number of ranks, {ranks()}; set it to 1, or let "
            "torchrun start a multiple of it"
        )
    if ranks() > 1 and cfg.model.device.startswith("cuda:"):
        raise UserError(
            f"model.device={cfg.model.device} puts all {ranks()} ranks on one GPU; write model.device=cuda, and each "
            "rank has its own"
        )
