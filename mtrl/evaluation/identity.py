"""Check that a resumed evaluation has the same settings and models as when it began."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from mtrl.config.keys import typed
from mtrl.config.plain_yaml import load_config
from mtrl.errors import UserError
from mtrl.evaluation.rollouts import Source
from mtrl.evaluation.settings import OF_A_RUN, READ
from mtrl.evaluation.sources import MODELS
from mtrl.record.run_dir import RunDir
from mtrl.utils.files import replace_text, to_strict_json

FREE = (
    *OF_A_RUN, "name", "plugins", "tracker", "trainer.threads", "environment.max_workers", "environment.resources",
    "evaluation.model", "evaluation.compare", "evaluation.output", "evaluation.endpoint.api_key_env",
    "evaluation.endpoint.timeout", "evaluation.endpoint.retries", "evaluation.endpoint.max_concurrent",
    "evaluation.endpoint.price", "evaluation.endpoint.budget",
)  # fmt: skip
"""Settings that may change between the calls. Models are compared by their weights, not by the text of the setting."""
SAMPLE = 1 << 20
"""Number of bytes at each end of a file that go into its fingerprint; training changes all weights."""
NAMED = ("*.safetensors", "*.bin", "config.json", "tokenizer.json", "chat_template*")


def begin(folder: Path, cfg: DictConfig, sources: Sequence[Source]) -> bool:
    """Record settings and models of a new evaluation, or check that they match the evaluation in the folder. Return
    whether it is resumed.

    Raises:
        UserError: The settings or the models differ from those in the folder.
    """
    models = [describe(source) for source in sources]
    known = folder / MODELS
    if not known.exists():
        replace_text(known, to_strict_json(models, indent=2) + "\n")
        RunDir(folder).write_config(cfg)
        return False
    if RunDir(folder).config.exists():
        _refuse_changes(folder, cfg)
    _refuse_models(folder, json.loads(known.read_text(encoding="utf-8")), models)
    RunDir(folder).write_config(cfg)
    return True


def describe(source: Source) -> dict[str, Any]:
    """Return the properties that identify a model."""
    return {
        "label": source.label,
        "kind": source.kind,
        "step": source.step,
        "model": source.model,
        "url": source.url,
        "weights": None if source.path is None else fingerprint(source.path),
    }


def fingerprint(path: str) -> str:
    """Return a digest of a GGUF file, or of the model files of a folder, from their names, sizes and the bytes at both
    ends; a Hub name unchanged."""
    place = Path(path)
    if not place.exists():
        return path
    files = [place] if place.is_file() else {file for pattern in NAMED for file in place.glob(pattern)}
    digest = hashlib.blake2b(digest_size=16)
    for file in sorted(files):
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        with file.open("rb") as stream:
            digest.update(stream.read(SAMPLE))
            stream.seek(max(0, size - SAMPLE))
            digest.update(stream.read(SAMPLE))
    return digest.hexdigest()


def _refuse_changes(folder: Path, cfg: DictConfig) -> None:
    was = _flat(OmegaConf.to_container(load_config(RunDir(folder).config), resolve=True))
    now = _flat(OmegaConf.to_container(cfg, resolve=True))
    for key in sorted(was.keys() | now.keys()):
        if _counts(key) and was.get(key) != now.get(key):
            raise UserError(
                f"evaluation.output={folder} began with {key}={typed(was.get(key))}, and this command has "
                f"{typed(now.get(key))}; repeat the first command to continue, or name another folder"
            )


def _refuse_models(folder: Path, was: list[dict[str, Any]], now: list[dict[str, Any]]) -> None:
    labels = [[model["label"] for model in models] for models in (was, now)]
    if labels[0] != labels[1]:
        raise UserError(
            f"evaluation.output={folder} began with the models {', '.join(labels[0])}, and this command has "
            f"{', '.join(labels[1])}; repeat the first command to continue, or name another folder"
        )
    for old, new in zip(was, now, strict=True):
        for key, value in new.items():
            if old.get(key) != value:
                raise UserError(
                    f"evaluation.output={folder} began with another {new['label']}: its {key} was {old.get(key)}, and "
                    f"is {value}; name another folder"
                )


def _counts(key: str) -> bool:
    def within(section: str) -> bool:
        return key == section or key.startswith(f"{section}.")

    return any(map(within, READ)) and not any(map(within, FREE))


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Return the leaves of a tree by dotted path."""
    if not isinstance(tree, dict) or not tree:
        return {prefix: tree}
    return {
        path: leaf
        for key, value in tree.items()
        for path, leaf in _flat(value, f"{prefix}.{key}" if prefix else str(key)).items()
    }
