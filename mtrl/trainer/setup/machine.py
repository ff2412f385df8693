"""Settings that follow from the machine: null values of a configuration that are chosen when a run starts."""

from __future__ import annotations

from dataclasses import replace

import torch

from mtrl.config.derived import prefers_bfloat16
from mtrl.config.schema import Config
from mtrl.models.attention import multiplies
from mtrl.trainer.loading import compute_dtype, is_vision_model, pick_device


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
    """Return a sentence about the settings that `with_machine_settings` chose, or about a slow dtype that the user set;
    None if there is neither."""
    dtype = chosen.trainer.fsdp.param_dtype
    if dtype == given.trainer.fsdp.param_dtype:
        return _slow_dtype(chosen)
    return (
        f"forward and backward passes are in {dtype}, which this machine multiplies; the weights stay in "
        f"{chosen.model.dtype} (trainer.fsdp.param_dtype=float32 computes in float32)"
    )


def _slow_dtype(config: Config) -> str | None:
    dtype = compute_dtype(config)
    if dtype == torch.float32 or pick_device(config.model.device).type != "cpu" or multiplies(dtype):
        return None
    return (
        f"forward and backward passes are in {str(dtype).removeprefix('torch.')}, for which this CPU has no "
        "instructions, so that they take several times as long as with trainer.fsdp.param_dtype=float32"
    )
