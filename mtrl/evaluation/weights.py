"""Loading of the weights of a source, without the state that only training needs."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from mtrl.command.stored import of_run
from mtrl.config.schema import Config
from mtrl.environments.factory import load_task
from mtrl.errors import UserError
from mtrl.evaluation.rollouts import Source
from mtrl.models.lora import merged_state_of
from mtrl.models.tiny_vision import make_policy
from mtrl.models.weight_files import model_digest
from mtrl.record.checkpoints import STATE
from mtrl.record.run_dir import RunDir
from mtrl.trainer.checkpoint.tensors import read_tensors
from mtrl.trainer.loading import load_model, pick_device
from mtrl.trainer.setup.parts import start_of
from mtrl.trainer.setup.start import check_start
from mtrl.trainer.update.policy import Policy


def load(source: Source, config: Config) -> tuple[Any, Any]:
    """Return module and tokenizer of a source that is a folder (including `base` with its path filled in), a Hub name
    or a checkpoint.

    Raises:
        UserError: The source cannot be loaded.
    """
    key = "model.path" if source.kind == "base" else "evaluation.model"
    if source.kind != "checkpoint":
        model, tokenizer = load_model(config, str(source.path), key)
        return aligned(model), tokenizer
    assert source.path is not None and source.run is not None
    own: Any = OmegaConf.to_object(of_run(source.run, []))
    adapted = bool(own.model.lora_rank)
    model, tokenizer = _beneath_adapters(own, config, source, key) if adapted else architecture(source.run, config)
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
    """Copy the weights of a module into memory of their own, and return the module. In a mapped file, the position of
    weights in memory depends on the file, and on a CPU the last bits of a product depend on that position, so the same
    weights from another file would give other log-probs."""
    for parameter in model.parameters():
        if parameter.device.type == "cpu":
            parameter.data = parameter.data.clone()
    return model


def _beneath_adapters(own: Any, config: Config, source: Source, key: str) -> tuple[Any, Any]:
    """Return the base model of a run with adapters, because its checkpoints hold only the adapters.

    Raises:
        UserError: the run began with another base model than its settings give now.
    """
    start = _start_of_run(own)
    state = json.loads((Path(source.path or "") / STATE).read_text(encoding="utf-8"))
    check_start(own, f"{key}={source.text}", state.get("start", ""), model_digest(start))
    return load_model(config, start)


def architecture(run: Path, config: Config) -> tuple[Any, Any]:
    """Return a module of the run's architecture, whose weights the caller replaces, and the run's tokenizer."""
    folder = RunDir(run)
    if (folder.export / "config.json").is_file():
        return load_model(config, str(folder.export))
    own: Any = OmegaConf.to_object(of_run(run, []))
    if own.model.name == "tiny" and (folder.tokenizer / "tokenizer.json").is_file():
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder.tokenizer)
        model = make_policy(own.model.tiny, tokenizer, own.seed)
        return model.eval().to(pick_device(config.model.device), getattr(torch, config.model.dtype)), tokenizer
    return load_model(config, _start_of_run(own))


def _start_of_run(own: Any) -> str:
    """Return the folder or Hub name of a run's policy before training. A warm start that is no longer in the cache is
    made in a thread, because its episodes need an event loop, and this thread's loop runs the evaluation."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(start_of, own, load_task(own)).result()
