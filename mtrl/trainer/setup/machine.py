"""Settings that follow from the machine: null values of a configuration that are chosen when a run starts."""

from __future__ import annotations

from dataclasses import replace

import torch

from mtrl.config.schema import Config
from mtrl.models.attention import multiplies
from mtrl.trainer.setup.loading import pick_device


def with_machine_settings(config: Config) -> Config:
    """Return the configuration with `trainer.fsdp.param_dtype` for this machine, if it is null.

    A pretrained model computes in bfloat16 on a GPU, and on a CPU that multiplies bfloat16; its weights stay in
    `model.dtype`. The tiny policy computes in `model.dtype`.
    """
    fsdp = config.trainer.fsdp
    if fsdp.param_dtype is not None or config.model.name == "tiny" or config.model.dtype != "float32":
        return config
    device = pick_device(config.model.device)
    if device.type == "cpu" and not multiplies(torch.bfloat16):
        return config
    return replace(config, trainer=replace(config.trainer, fsdp=replace(fsdp, param_dtype="bfloat16")))


def machine_note(given: Config, chosen: Config) -> str | None:
    """Return a sentence about the settings that `with_machine_settings` chose; None if there are none."""
    dtype = chosen.trainer.fsdp.param_dtype
    if dtype == given.trainer.fsdp.param_dtype:
        return None
    return (
        f"forward and backward passes are in {dtype}, which is faster here; the weights stay in {chosen.model.dtype} "
        f"(trainer.fsdp.param_dtype=float32 computes in float32)"
    )
