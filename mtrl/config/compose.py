"""Composition of a checked configuration from overrides, for the entry points and for tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import hydra
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from mtrl.config import messages
from mtrl.config.checks import check
from mtrl.config.config_dir import PRIMARY, check_config_dir
from mtrl.config.overrides import CONF, normalise
from mtrl.config.plain_yaml import check_groups
from mtrl.config.runs import settle
from mtrl.config.schema import Config

VERSION_BASE = "1.3"

ConfigStore.instance().store(name="schema", node=Config)


def compose(overrides: Sequence[str] = (), config_dir: str | None = None) -> DictConfig:
    """Return the configuration that `python -m mtrl.main OVERRIDES` runs, with `run_dir` resolved and all checks made.

    Example::

        cfg = compose(["experiment=text_to_sql", "trainer.max_steps=2"])

    Raises:
        UserError: the configuration is wrong; the message is one sentence.
        NotImplementedError: the backend does not support a setting.
    """
    cfg = merge(normalise(overrides, config_dir), config_dir)
    settle(cfg)
    check(cfg)
    return cfg


def merge(overrides: Sequence[str], config_dir: str | None = None) -> DictConfig:
    """Merge groups, experiment and (normalised) overrides into one tree; only keys and types are checked."""
    cfg = merge_with_hydra(overrides, config_dir)
    with open_dict(cfg):
        del cfg.hydra
    try:
        OmegaConf.to_container(cfg, resolve=True)  # raises if an interpolation cannot be resolved
    except OmegaConfBaseException as error:
        raise messages.explain(error) from error
    return cfg


def merge_with_hydra(overrides: Sequence[str], config_dir: str | None) -> DictConfig:
    """Like `merge`, but with Hydra's own configuration and with unresolved interpolations."""
    if config_dir:
        check_config_dir(Path(config_dir))
        check_groups(Path(config_dir))
        overrides = [*overrides, f"hydra.searchpath=['file://{Path(config_dir).resolve()}']"]
    try:
        with hydra.initialize_config_dir(str(CONF), job_name="mtrl", version_base=VERSION_BASE):
            return hydra.compose(PRIMARY, overrides=list(overrides), return_hydra_config=True)
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        raise messages.explain(error) from error
