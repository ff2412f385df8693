"""The Hugging Face folder of the model that servers start with."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from safetensors import safe_open

from mtrl.errors import UserError
from mtrl.utils.hub import is_out_of_reach
from mtrl.utils.text import one_line

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")
"""Suffixes of files of weights and of their indices."""
HEAD = "lm_head.weight"
"""Name of the output matrix. The files of a model in which it is tied may contain it or not."""
SMALL = 2**26
"""Maximum size, in bytes, of another file that counts as part of the tokenizer or the configuration."""


def model_folder(model: str) -> Path:
    """Return the folder of a model, given as a folder or as a Hub name (whose files are downloaded if they are not
    cached).

    Raises:
        UserError: the model does not exist.
    """
    if (folder := Path(model)).is_dir():
        return folder
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                model,
                allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"],
                local_files_only=is_out_of_reach(model),
            )
        )
    except Exception as error:  # the Hub's client raises errors of many types
        raise UserError(f"model.path={model} is neither a folder nor a model of the Hub ({one_line(error)})") from error


def copy_settings(model: str, folder: Path) -> None:
    """Copy all files of a model but the weights to `folder`: configuration, tokenizer, template."""
    for file in sorted(model_folder(model).iterdir()):
        if file.is_file() and not file.name.endswith(WEIGHTS) and file.stat().st_size <= SMALL:
            shutil.copyfile(file, folder / file.name)


def model_shapes(model: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a model's weights by their names in its safetensors files, tied ones once; empty where it
    has no such files."""
    folder = model_folder(model)
    files, tied = sorted(folder.glob("*.safetensors")), is_tied(folder)
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name in list(tensors.keys()):
                if not (tied and name == HEAD):
                    shapes[name] = tuple(tensors.get_slice(name).get_shape())
    return shapes


def is_tied(folder: Path) -> bool:
    """Whether the output matrix of the model is tied to its embedding."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return bool(config.get("tie_word_embeddings", config.get("text_config", {}).get("tie_word_embeddings", False)))
