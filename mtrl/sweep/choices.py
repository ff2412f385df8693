"""The choices of a sweep: those of `sweep=NAME` (`hydra.sweeper.params`) as if they had been typed."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

from hydra.core.override_parser.overrides_parser import OverridesParser

from mtrl.command.compose import merge_with_hydra
from mtrl.config.overrides import normalise
from mtrl.errors import missing_extra
from mtrl.sweep.pruning import check_objective
from mtrl.sweep.study import TARGET


def names_sweep(overrides: Sequence[str]) -> bool:
    """Whether these (normalised) overrides select a file of conf/sweep/."""
    return any(word.startswith("sweep=") for word in overrides)


def typed_out(overrides: Sequence[str], config_dir: str | None) -> list[str]:
    """Return the overrides of a sweep, including those of `hydra.sweeper.params`. A typed key has priority.

    Raises:
        UserError: the sweep needs a package that is not installed, or prunes by an objective that is not measured.
    """
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    plain = [override.input_line or "" for override in parsed if not override.is_sweep_override()]
    cfg = merge_with_hydra(plain, config_dir)
    sweeper = cfg.hydra.sweeper
    if sweeper._target_ == TARGET:
        if find_spec("optuna") is None:
            raise missing_extra("optuna", "sweep")
        if sweeper.pruner is not None:
            check_objective(cfg.objective)
    params = sweeper.get("params")
    if not params:
        return list(overrides)
    typed = {override.key_or_group for override in parsed}
    added = normalise([f"{key}={value}" for key, value in params.items() if key not in typed], config_dir)
    return [*added, *overrides, "hydra.sweeper.params=null"]
