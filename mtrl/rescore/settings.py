"""The configuration to score by: that of the run, with what the command line changes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from omegaconf import DictConfig, OmegaConf

from mtrl.config.checks import check
from mtrl.config.compose import merge
from mtrl.config.overrides import CONF, normalise
from mtrl.errors import UserError
from mtrl.tracking.run_dir import RunDir

READ = ("reward", "environment", "data", "evaluation.success_threshold", "generator.max_turns", "plugins")
"""Keys and sections that a rescoring reads; of a run, others change nothing."""


def configuration(run: Path | None, overrides: Sequence[str]) -> tuple[DictConfig, list[str]]:
    """The checked configuration, and warnings.

    Raises:
        UserError: whatever is wrong with it, or an override that changes nothing.
    """
    cfg = merge(normalise(overrides)) if run is None else of_run(run, overrides)
    return cfg, check(cfg)


def of_run(run: Path, overrides: Sequence[str]) -> DictConfig:
    """The run's config.yaml takes the place of the experiment; a group that is chosen anew replaces its section."""
    stored: Any = OmegaConf.to_container(OmegaConf.load(RunDir(run).config))
    if not isinstance(stored, dict):
        raise UserError(f"{RunDir(run).config} is no configuration of a run; give another run")
    components = stored.get("reward", {}).get("components")
    for key in ("run_dir", "resume", "preflight"):
        stored.pop(key, None)
    for override in overrides:
        key = check_read(override)
        if (CONF / key).is_dir():
            stored.pop(key, None)
    with TemporaryDirectory(prefix="mtrl-") as folder:
        experiment = Path(folder) / "experiment" / "of_the_run.yaml"
        experiment.parent.mkdir()
        experiment.write_text(f"# @package _global_\n{OmegaConf.to_yaml(OmegaConf.create(stored))}", encoding="utf-8")
        cfg = merge(["experiment=of_the_run", *normalise(overrides)], folder)
    if components is not None and not any("reward" in override.partition("=")[0] for override in overrides):
        cfg.reward.components = components  # the default group adds its own, which the run may have left out
    return cfg


def check_read(override: str) -> str:
    """The key of an override that changes something.

    Raises:
        UserError: it would change nothing.
    """
    key = override.lstrip("+~").partition("=")[0]
    if not any(key == read or key.startswith(f"{read}.") for read in READ):
        raise UserError(f"{override} changes nothing here: rescoring a run reads {', '.join(READ)}")
    return key
