"""Settings that follow from the machine: null values of a configuration that are chosen when a run starts."""

from __future__ import annotations

from dataclasses import replace

import torch

from mtrl.config.derived import prefers_bfloat16
from mtrl.config.schema import Config
from mtrl.models.attention import multiplies
from mtrl.trainer.loading import is_vision_model, pick_device


def with_machine_settings(config: Config) -> Config:
    """Return the configuration with `trainer.fsdp.param_dtype` for this machine, if it is null.

    A pretrained model computes in bfloat16 on a GPU, and on a CPU that multiplies bfloat16; its weights stay in
    `model.dtype`. The tiny policy, and models that read images, compute in `model.dtype`.
    """
    if not prefers_bfloat16(config) or is_vision_model(config):
        return config
    device = pick_device(config.model.device)
    if device.type == "cpu" and not multiplies(torch.bfloat16):
        return config
    return replace(config, trainer=replace(config.trainer, fsdp=replace(config.trainer.fsdp, param_dtype="bfloat16")))


def machine_note(given: Config, chosen: Config) -> str | None:
    """Return a sentence about the settings that `with_machine_settings` chose; None if there are none."""
    dtype = chosen.trainer.fsdp.param_dtype
    if dtype == given.trainer.fsdp.param_dtype:
        return None
    return (
        f"forward and backward passes are in {dtype}, which this machine multiplies; the weights stay in "
        f"{chosen.model.dtype} (trainer.fsdp.param_dtype=float32 computes in float32)"
    )
