"""The Optuna study of a sweep, kept in a file of its folder, so that jobs in other processes can tell it their scores
and a sweep that was stopped goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from mtrl.errors import UserError, missing_extra

STUDY = "optuna.log"
NAME = "sweep"
TARGET = "hydra_plugins.mtrl_optuna.OptunaSweeper"
"""`hydra.sweeper._target_` of the sweeps that have a study."""


def open_study(folder: Path, sweeper: DictConfig) -> tuple[Any, Any]:
    """The study of the sweep in `folder`, new or as it was left, and its storage.

    Args:
        sweeper: `hydra.sweeper` of the configuration: direction, sampler and pruner.

    Raises:
        UserError: Optuna is not installed, or has no such sampler or pruner.
    """
    try:
        import optuna
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend
    except ImportError as error:
        raise missing_extra("optuna", "sweep") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    storage = JournalStorage(JournalFileBackend(str(folder / STUDY)))
    study = optuna.create_study(
        storage=storage,
        study_name=NAME,
        direction=sweeper.direction,
        sampler=made(sweeper, "sampler"),
        pruner=made(sweeper, "pruner") or optuna.pruners.NopPruner(),
        load_if_exists=True,
    )
    return study, storage


def made(sweeper: DictConfig, part: str) -> Any:
    """The sampler or the pruner that `_target_` names; None: none is asked for.

    Raises:
        UserError: there is no such class, or it takes other arguments.
    """
    from hydra.errors import InstantiationException
    from hydra.utils import instantiate

    settings = OmegaConf.create(OmegaConf.to_container(sweeper[part], resolve=True)) if sweeper[part] else None
    if settings is None:
        return None
    try:
        return instantiate(settings)
    except InstantiationException as error:
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"hydra.sweeper.{part}._target_={settings.get('_target_')} cannot be made ({reason}); name a class of "
            f"optuna.{part}s and its arguments"
        ) from error
