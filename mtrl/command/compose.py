"""Composition of a checked configuration from overrides, for the entry points and for tests."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from mtrl.command.checks import check
from mtrl.command.runs import settle
from mtrl.config import messages
from mtrl.config.config_dir import PRIMARY, check_folders, misplaced, names_folders, own_folders, packages
from mtrl.config.outputs import check_local
from mtrl.config.overrides import CONF, key_of, normalise, quoted
from mtrl.config.schema import Config
from mtrl.errors import UserError

VERSION_BASE = "1.3"
SWEPT = "hydra.sweeper.params"
"""Hydra's key for the values of a sweep, which is null where no file of conf/sweep/ sets it."""

ConfigStore.instance().store(name="schema", node=Config)


def compose(overrides: Sequence[str] = (), config_dir: str | None = None) -> DictConfig:
    """Return the configuration that `mtrl train OVERRIDES` runs, with `run_dir` resolved and all checks made.

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
    return _remove_hydra(merge_with_hydra(overrides, config_dir))


def without_hydra(composed: DictConfig) -> DictConfig:
    """Return a copy of a composed configuration without Hydra's own section. Only its interpolations and Hydra's
    folders are checked.

    Raises:
        UserError: an interpolation cannot be resolved, or a folder is an address.
    """
    return _remove_hydra(copy.deepcopy(composed))


def _remove_hydra(cfg: DictConfig) -> DictConfig:
    """Like `without_hydra`, but in `cfg` itself, since a copy takes a tenth of the time of a composition."""
    for kind in ("run", "sweep"):
        folder: Any = OmegaConf.to_container(cfg.hydra[kind], resolve=False)
        check_local(f"hydra.{kind}.dir={folder['dir']}", folder["dir"])
    with open_dict(cfg):
        del cfg.hydra
    try:
        OmegaConf.to_container(cfg, resolve=True)  # raises if an interpolation cannot be resolved
    except OmegaConfBaseException as error:
        raise messages.explain(error) from error
    return cfg


def merge_with_hydra(overrides: Sequence[str], config_dir: str | None) -> DictConfig:
    """Like `merge`, but with Hydra's own configuration and with unresolved interpolations."""
    words, folders = [word for word in overrides if not names_folders(word)], own_folders(overrides, config_dir)
    check_folders(folders)
    if places := [*(f"file://{folder.resolve()}" for folder in folders), *packages(overrides)]:
        words.append("hydra.searchpath=[" + ",".join(quoted("", place)[1:] for place in places) + "]")
    try:
        with naming_params(words), hydra.initialize_config_dir(str(CONF), job_name="mtrl", version_base=VERSION_BASE):
            return hydra.compose(PRIMARY, overrides=words, return_hydra_config=True)
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        raise misplaced(error, folders) or messages.explain(error) from error


@contextmanager
def naming_params(words: Sequence[str]) -> Iterator[None]:
    """Convert the errors of OmegaConf for a key of `SWEPT` where it is null, which are none of its own classes.

    Raises:
        UserError: one of the overrides `words` sets such a key.
    """
    try:
        yield
    except (AttributeError, AssertionError) as error:
        if (word := next((word for word in words if key_of(word).startswith(SWEPT)), None)) is None:
            raise
        raise UserError(
            f"{word} cannot be set without a sweep that has {SWEPT}; write the values behind their keys and add -m, "
            "for example mtrl train -m seed=0,1"
        ) from error
