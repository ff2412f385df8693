"""The trackers of a run: the settings of its configuration, changed by the command line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mtrl.config import keys
from mtrl.config.messages import check_values, unknown_key, wrong_type
from mtrl.config.schema import MlflowConfig, TrackerConfig, WandbConfig
from mtrl.errors import UserError
from mtrl.record.run import Run
from mtrl.record.run_dir import RunDir
from mtrl.trackers.start import check_trackers

SECTION = "tracker."


def run_at(path: str) -> RunDir:
    """Return the run at `path`.

    Raises:
        UserError: `path` is not the folder of a run.
    """
    return Run.open(path).dir


def tracker_of(run: RunDir, to: Sequence[str], overrides: Sequence[str]) -> tuple[TrackerConfig, list[str]]:
    """Return the settings, and warnings about settings without effect.

    Raises:
        UserError: A key or a value is invalid, or no tracker is named.
    """
    cfg = OmegaConf.create({"tracker": OmegaConf.structured(TrackerConfig)})
    cfg.tracker.merge_with(_known(Run(run.path).stored_config.tree.get("tracker")))
    for override in overrides:
        _apply(cfg, override)
    if to:
        cfg.tracker.report_to = list(dict.fromkeys(to))
    if not cfg.tracker.report_to:
        raise UserError(f"{run} reports to no tracker; name one: --to mlflow, --to wandb or --to tensorboard")
    check_values(keys.plain(cfg))
    warnings = check_trackers(cfg)
    return OmegaConf.to_object(cfg.tracker), warnings if overrides else []  # type: ignore[return-value]


def _known(stored: Any) -> dict[str, Any]:
    """Return the stored settings whose keys still exist; the run may be of an older version."""
    stored = stored if isinstance(stored, dict) else {}
    found = _of(TrackerConfig, stored)
    for name, section in (("mlflow", MlflowConfig), ("wandb", WandbConfig)):
        found[name] = _of(section, stored.get(name) or {})
    return found


def _of(section: type, stored: dict[str, Any]) -> dict[str, Any]:
    return {field.name: stored[field.name] for field in fields(section) if field.name in stored}


def _apply(cfg: DictConfig, override: str) -> None:
    path, is_set, value = override.lstrip("+").partition("=")
    if not is_set:
        raise UserError(f"{override} is no setting; write {SECTION}KEY=VALUE")
    if keys.find(path) is None:
        raise unknown_key(path, value)
    if not path.startswith(SECTION):
        raise UserError(f"{override} changes nothing here: sending a run reads {SECTION}*")
    try:
        cfg.merge_with_dotlist([f"{path}={value}"])
    except OmegaConfBaseException as error:
        raise wrong_type(path, value) from error
