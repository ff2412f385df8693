"""The policy before training, which a resumed run shares with its checkpoint.

A checkpoint holds the weights that are trained. With adapters the others are those of the start, and so are a KL
reference and a frozen opponent without paths of their own. The tiny policy's tokenizer belongs to its warm start.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mtrl.config.schema import Config
from mtrl.errors import UserError
from mtrl.models.tokenizer_difference import difference
from mtrl.trainer.setup.models import needs_reference


def depends_on_start(config: Config) -> str | None:
    """Return what a resumed run takes from the policy before training, for an error; None if it takes nothing."""
    if config.model.lora_rank:
        return "the weights beneath the adapters"
    if needs_reference(config) and not config.algorithm.kl_reference:
        return "the reference of the KL (algorithm.kl_reference=null)"
    if config.environment.opponent == "frozen" and not config.environment.opponent_path:
        return "the frozen opponent (environment.opponent_path=null)"
    return None


def check_start(config: Config, key: str, before: str, now: str) -> None:
    """Check that the policy before training is the one with which the checkpoint's run began.

    Args:
        key: key and value of the configuration that name the checkpoint, for the error.
        before, now: digests of its weights; empty if unknown, as in checkpoints of earlier versions.

    Raises:
        UserError: it is another one, and the run depends on it.
    """
    needed = depends_on_start(config)
    if needed and before and now and before != now:
        path = f"model.path={config.model.path or 'null'}"
        warm = config.model.name == "tiny" or config.model.warm_start.enabled
        copied = ", copy the folder of the warm start from the cache of the machine where the run began" if warm else ""
        raise UserError(
            f"{key}: {needed} would not be those with which the run began, because {path} now "
            f"{'gives another warm start' if warm else 'holds other weights'}; repeat the first command's settings "
            f"(model, seed, data){copied}, or start a new run"
        )


def tokenizer_of_run(config: Config, folder: Path, now: Any) -> Any:
    """Return the tokenizer of a resumed run, to which its weights belong. For the tiny policy, whose tokenizer changes
    with its demonstrations, it is the stored one if that reads texts otherwise than `now`, the tokenizer of the start;
    that of a pretrained model is always `now`.

    Args:
        folder: the run's folder of its tokenizer; the result is `now` if it holds none.

    Raises:
        UserError: the two differ, and the run depends on the start, or they have another number of tokens.
    """
    from transformers import AutoTokenizer

    if config.model.name != "tiny" or not (folder / "tokenizer_config.json").is_file():
        return now
    stored = AutoTokenizer.from_pretrained(folder)
    how = difference(stored, now, "the run", "this command")
    if how is None and len(stored) == len(now):
        return now
    if depends_on_start(config) or len(stored) != len(now):
        raise UserError(
            f"resume={config.resume}: the weights belong to the tokenizer in {folder}, and this command has another "
            f"one ({how or f'{len(now)} tokens, and not {len(stored)}'}); repeat the first command's settings (model, "
            "seed, data), or start a new run"
        )
    return stored
