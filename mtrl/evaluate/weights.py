"""Loading the weights of a source, without anything that training needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from omegaconf import OmegaConf

from mtrl.config.schema import Config
from mtrl.config.stored import of_run
from mtrl.environments.factory import load_task
from mtrl.errors import UserError
from mtrl.evaluation.rollouts import Source
from mtrl.models.tiny import make_model
from mtrl.tracking.run_dir import RunDir
from mtrl.trainer.policy import Policy
from mtrl.trainer.setup import load_model, pick_device, start_of, tiny_recipe


def load(source: Source, config: Config) -> tuple[Any, Any]:
    """Module and tokenizer of a source that is a folder (that of `base` filled in), a Hub name or a checkpoint.

    Raises:
        UserError: it cannot be loaded.
    """
    key = "model.path" if source.kind == "base" else "evaluation.model"
    if source.kind != "checkpoint":
        model, tokenizer = load_model(config, str(source.path), key)
        return aligned(model), tokenizer
    assert source.path is not None and source.run is not None
    model, tokenizer = architecture(source.run, config)
    file = Path(source.path) / "model.safetensors"
    try:
        Policy(model, tokenizer).load(safetensors.torch.load_file(file))
    except (OSError, ValueError, RuntimeError, safetensors.SafetensorError) as error:
        first = str(error).strip().splitlines()[0]
        raise UserError(
            f"{key}={source.text} cannot be loaded ({first}); give another checkpoint of the run"
        ) from error
    return aligned(model), tokenizer


def aligned(model: Any) -> Any:
    """The module with weights in memory of their own. Left in a mapped file they lie as the file has them, and on a CPU
    the last bits of a product depend on that: the same weights would give other log-probs from another file."""
    for parameter in model.parameters():
        if parameter.device.type == "cpu":
            parameter.data = parameter.data.clone()
    return model


def architecture(run: Path, config: Config) -> tuple[Any, Any]:
    """A module of the run's architecture, its weights about to be replaced, and the run's tokenizer."""
    folder = RunDir(run)
    if (folder.export / "config.json").is_file():
        return load_model(config, str(folder.export))
    own: Any = OmegaConf.to_object(of_run(run, []))
    if own.model.name == "tiny" and (folder.tokenizer / "tokenizer.json").is_file():
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder.tokenizer)
        model = make_model(tiny_recipe(own), tokenizer, own.seed)
        return model.eval().to(pick_device(config.model.device), getattr(torch, config.model.dtype)), tokenizer
    return load_model(config, start_of(own, load_task(own)))
