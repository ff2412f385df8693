"""Checks of settings for scale and overlap: `placement.*`, `async_config.*`, `trainer.fsdp.*` and the ranks."""

from __future__ import annotations

import math
import os

from omegaconf import DictConfig

from mtrl.config.schema import Config
from mtrl.errors import UserError


def ranks() -> int:
    """Return the number of processes that `torchrun` has started for this job."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_sharded(cfg: DictConfig) -> bool:
    """Return whether models are sharded: over several ranks, or on one rank for settings that only FSDP supports."""
    return ranks() > 1 or cfg.trainer.fsdp.param_dtype is not None or bool(cfg.trainer.fsdp.cpu_offload)


def overlaps(cfg: DictConfig | Config) -> bool:
    """Return whether turns are sampled while the policy is updated."""
    return cfg.async_config.max_steps_off_policy > 0


def serves(cfg: DictConfig | Config) -> bool:
    """Return whether inference servers, each with its own copy of the weights, sample the turns."""
    return cfg.generator.backend != "local"


def is_deterministic(cfg: DictConfig | Config) -> bool:
    """Return whether turns wait for each other, so that the composition of decoding batches does not depend on time."""
    chosen = cfg.generator.local.deterministic
    return not serves(cfg) and (not overlaps(cfg) if chosen is None else bool(chosen))


def check_scale(cfg: DictConfig) -> None:
    """Check the settings for scale and overlap.

    Raises:
        UserError: settings contradict each other.
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
