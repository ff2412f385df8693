"""Loading the weights of a source, without anything that training needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from mtrl.config.schema import Config
from mtrl.config.stored import of_run
from mtrl.environments.factory import load_task
from mtrl.errors import UserError
from mtrl.evaluation.rollouts import Source
from mtrl.models.lora import merged_state_of
from mtrl.models.tiny import make_model
from mtrl.tracking.run_dir import RunDir
from mtrl.trainer.checkpoint_tensors import read_tensors
from mtrl.trainer.loading import load_model, pick_device
from mtrl.trainer.policy import Policy
from mtrl.trainer.setup import start_of


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
    own: Any = OmegaConf.to_object(of_run(source.run, []))
    adapted = bool(own.model.lora_rank)
    model, tokenizer = _beneath_adapters(own, config) if adapted else architecture(source.run, config)
    try:
        weights = read_tensors(Path(source.path), "model")
        if adapted:
            weights = merged_state_of(model.state_dict(), weights, own.model.lora_alpha / own.model.lora_rank)
        Policy(model, tokenizer).load(weights)
    except UserError as error:
        raise UserError(f"{key}={source.text} cannot be loaded: {error}") from error
    except (ValueError, RuntimeError) as error:
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


def _beneath_adapters(own: Any, config: Config) -> tuple[Any, Any]:
    """The model that a run trained adapters for: their checkpoints hold nothing else."""
    return load_model(config, start_of(own, load_task(own)))


def architecture(run: Path, config: Config) -> tuple[Any, Any]:
    """A module of the run's architecture, its weights about to be replaced, and the run's tokenizer."""
    folder = RunDir(run)
    if (folder.export / "config.json").is_file():
        return load_model(config, str(folder.export))
    own: Any = OmegaConf.to_object(of_run(run, []))
    if own.model.name == "tiny" and (folder.tokenizer / "tokenizer.json").is_file():
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder.tokenizer)
        model = make_model(own.model.tiny, tokenizer, own.seed)
        return model.eval().to(pick_device(config.model.device), getattr(torch, config.model.dtype)), tokenizer
    return load_model(config, start_of(own, load_task(own)))
