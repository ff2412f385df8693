"""The stored configuration of an existing run, for programs that read runs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import reduce
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from omegaconf import DictConfig, OmegaConf

from mtrl.command.compose import merge
from mtrl.config.overrides import CONF, key_of, normalise
from mtrl.config.plain_yaml import literal, read_config
from mtrl.record.run_dir import RunDir

OF_RANKS = ("fsdp.replicas", "sequence_parallel", "tensor_parallel", "expert_parallel")
"""Keys of `trainer` that must fit the number of the run's ranks."""
THEIRS = ("run_dir", "resume", "preflight", *(f"trainer.{key}" for key in OF_RANKS))
"""Keys and sections that matter only to the run itself."""


def of_run(run: Path, overrides: Sequence[str], forget: Collection[str] = THEIRS) -> DictConfig:
    """Compose a configuration with the run's config.yaml in place of the experiment. A group that the overrides choose
    replaces its section.

    Args:
        forget: keys and sections of the run that are reset to their defaults.

    Raises:
        UserError: config.yaml is not a configuration, or the overrides do not fit.
    """
    stored = read_config(RunDir(run).config)
    _choose_prompt(stored)
    components = stored.get("reward", {}).get("components")
    chosen = [key for key in map(key_of, overrides) if (CONF / key).is_dir()]
    for path in (*forget, *chosen):
        *sections, key = path.split(".")
        reduce(lambda tree, section: tree.get(section) or {}, sections, stored).pop(key, None)
    with TemporaryDirectory(prefix="mtrl-") as folder:
        experiment = Path(folder) / "experiment" / "of_the_run.yaml"
        experiment.parent.mkdir()
        experiment.write_text(f"# @package _global_\n{OmegaConf.to_yaml(literal(stored))}", encoding="utf-8")
        cfg = merge(["experiment=of_the_run", *normalise(overrides)], folder)
    if components is not None and not any("reward" in override.partition("=")[0] for override in overrides):
        cfg.reward.components = literal(components)  # the default group adds components that the run may not have
    return cfg


def _choose_prompt(stored: dict[str, Any]) -> None:
    """Set `environment.prompt` in the configuration of a run that is older than this key, so that the run keeps its
    prompts: they were full only with the setting `full_prompt` of the task."""
    environment = stored.get("environment")
    if isinstance(environment, dict) and "prompt" not in environment:
        settings = environment.get("config")
        was_full = isinstance(settings, dict) and settings.pop("full_prompt", False)
        environment["prompt"] = "full" if was_full else "short"
