"""The Optuna study of a sweep. The study is stored in a file of the sweep's folder, so that jobs in other processes can
report their scores and a stopped sweep can be resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from mtrl.errors import UserError, missing_extra

STUDY = "optuna.log"
NAME = "sweep"
TARGET = "hydra_plugins.mtrl_optuna.OptunaSweeper"
"""Value of `hydra.sweeper._target_` for sweeps with a study."""


def open_study(folder: Path, sweeper: DictConfig) -> tuple[Any, Any]:
    """Return the study of the sweep in `folder`, new or resumed, and its storage.

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
    """Create the sampler or the pruner that `_target_` names; None if the configuration sets none.

    Raises:
        UserError: the class does not exist, or does not accept the arguments.
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
