"""The configuration of a run that is there, for the programs that look at runs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from omegaconf import DictConfig, OmegaConf

from mtrl.config.compose import merge
from mtrl.config.overrides import CONF, normalise
from mtrl.config.plain_yaml import literal, load_config
from mtrl.tracking.run_dir import RunDir

THEIRS = ("run_dir", "resume", "preflight")
"""What only the run itself needed."""


def read_config(path: Path) -> dict[str, Any]:
    """A config.yaml as a plain tree.

    Raises:
        UserError: it cannot be read as one.
    """
    tree = OmegaConf.to_container(load_config(path), resolve=True)
    assert isinstance(tree, dict)
    return {str(key): value for key, value in tree.items()}


def of_run(run: Path, overrides: Sequence[str], forget: Collection[str] = THEIRS) -> DictConfig:
    """The run's config.yaml takes the place of the experiment; a group that is chosen anew replaces its section.

    Args:
        forget: keys and sections of the run that go back to their defaults.

    Raises:
        UserError: it is no configuration, or the overrides do not fit.
    """
    stored = read_config(RunDir(run).config)
    components = stored.get("reward", {}).get("components")
    chosen = [key for key in map(key_of, overrides) if (CONF / key).is_dir()]
    for path in (*forget, *chosen):
        section, _, key = path.rpartition(".")
        (stored.get(section) or {} if section else stored).pop(key, None)
    with TemporaryDirectory(prefix="mtrl-") as folder:
        experiment = Path(folder) / "experiment" / "of_the_run.yaml"
        experiment.parent.mkdir()
        experiment.write_text(f"# @package _global_\n{OmegaConf.to_yaml(literal(stored))}", encoding="utf-8")
        cfg = merge(["experiment=of_the_run", *normalise(overrides)], folder)
    if components is not None and not any("reward" in override.partition("=")[0] for override in overrides):
        cfg.reward.components = literal(components)  # the default group adds its own, which the run may have left out
    return cfg


def key_of(override: str) -> str:
    """The key that an override sets, without Hydra's signs."""
    return override.lstrip("+~").partition("=")[0]
