"""Checks of a model that reads images, and of a task that shows them, with the other settings."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf

from mtrl.algorithms.registry import find_estimator
from mtrl.config.derived import distils, in_a_process, overlaps, ranks, runs_agent, serves
from mtrl.config.mixture import source_configs
from mtrl.config.schema import Config
from mtrl.errors import UserError
from mtrl.utils.files import in_home

VISION_TYPES = ("qwen2_5_vl", "qwen3_vl")
"""Model types of the configurations of models that read images in mtrl (`mtrl.models.vision.FAMILIES`)."""


def check_images(cfg: DictConfig) -> list[str]:
    """Check that the model reads the images that the task shows, and that all settings work with such a model, as far
    as this is known before the model is loaded. Return warnings about settings without effect.

    Raises:
        UserError: they do not fit together.
    """
    sees, shows = reads_images(cfg), _shown(cfg)
    if shows and sees is False and "@http" not in str(cfg.evaluation.model):  # else the model is behind an API
        named = "model.name=tiny" if cfg.model.name == "tiny" else f"model.path={cfg.model.path}"
        raise UserError(
            f"environment.name={shows} shows images, and {named} reads text only; set model=tiny_vision, or "
            "model=hf with model.path of a Qwen-VL model"
        )
    if sees:
        check_vision(cfg, _name(cfg))
    elif sees is False and not cfg.model.freeze_vision:
        return ["model.freeze_vision=false has no effect: the model has no vision tower"]
    return []


def reads_images(cfg: DictConfig | Config) -> bool | None:
    """Return whether the model reads images; None if its configuration is not in a folder on this machine."""
    if cfg.model.name == "tiny":
        return cfg.model.tiny.vision_layers > 0
    path = str(cfg.model.path or "")
    if path.lower().endswith(".gguf"):
        return False
    file = in_home(path) / "config.json"
    if not file.is_file():
        return None
    try:
        return bool(json.loads(file.read_text(encoding="utf-8")).get("model_type") in VISION_TYPES)
    except (ValueError, AttributeError):
        return None  # the loader reports a damaged file


def check_vision(cfg: DictConfig | Config, model: str) -> None:
    """Check that the settings work with a model that reads images.

    Args:
        model: key and value that name the model, for error messages.

    Raises:
        UserError: a setting does not; the message names all that must change.
    """
    problems = dict(_unsupported(cfg))
    if problems:
        raise UserError(
            f"{model} reads images, which mtrl does not support with {' and '.join(problems)}; set "
            f"{', '.join(problems.values())}"
        )


def _unsupported(cfg: DictConfig | Config) -> Iterator[tuple[str, str]]:
    """Yield each setting that does not work with images, and its replacement."""
    generator, trainer, model, algorithm = cfg.generator, cfg.trainer, cfg.model, cfg.algorithm
    method = find_estimator(algorithm.advantage_method)
    if serves(cfg):
        yield f"generator.backend={generator.backend}", "generator=local"
    if runs_agent(cfg):
        yield "a program of generator.agent", "generator.agent to its defaults"
    if not generator.use_conversation_multi_turn:
        yield "generator.use_conversation_multi_turn=false", "generator.use_conversation_multi_turn=true"
    if generator.context.fold != "none":
        yield f"generator.context.fold={generator.context.fold}", "generator.context.fold=none"
    if overlaps(cfg):
        yield (
            f"async_config.max_steps_off_policy={cfg.async_config.max_steps_off_policy}",
            ("async_config.max_steps_off_policy=0"),
        )
    elif in_a_process(cfg):
        yield "an engine in a process of its own", "generator.local.process=false generator.local.replicas=1"
    if cfg.rollouts.workers:
        yield f"rollouts.workers={cfg.rollouts.workers}", "rollouts.workers=0"
    if cfg.environment.opponent != "scripted":
        yield f"environment.opponent={cfg.environment.opponent}", "environment.opponent=scripted"
    if ranks() > 1:
        yield f"{ranks()} ranks", "the number of processes to 1"
    if trainer.fsdp.param_dtype is not None or trainer.fsdp.cpu_offload:
        yield "trainer.fsdp", "trainer.fsdp.param_dtype=null trainer.fsdp.cpu_offload=false"
    if trainer.packing:
        yield "trainer.packing=true", "trainer.packing=false"
    if trainer.compile:
        yield "trainer.compile=true", "trainer.compile=false"
    if model.lora_rank:
        yield f"model.lora_rank={model.lora_rank}", "model.lora_rank=0"
    if algorithm.router_replay:
        yield "algorithm.router_replay=true", "algorithm.router_replay=false"
    if method.needs_critic:
        yield f"the critic of algorithm.advantage_method={method.name}", "algorithm=turn_rloo"
    if distils(cfg):
        yield "a teacher", "distillation.weight=0"


def _shown(cfg: DictConfig) -> str | None:
    """Return the name of a task that shows images; None if no task of the run declares that it does."""
    from mtrl.environments.family import get_family

    config: Any = OmegaConf.to_object(cfg) if cfg.environments else cfg
    tasks = [own.environment for own in source_configs(config).values()] if cfg.environments else [cfg.environment]
    return next((task.name for task in tasks if get_family(task.name, task.target).shows_images), None)


def _name(cfg: Any) -> str:
    tiny = cfg.model.name == "tiny"
    return f"model.tiny.vision_layers={cfg.model.tiny.vision_layers}" if tiny else f"model.path={cfg.model.path}"
