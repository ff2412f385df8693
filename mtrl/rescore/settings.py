"""The configuration of a rescoring: that of the run, with the overrides of the command line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig

from mtrl.command.checks import check
from mtrl.command.compose import merge
from mtrl.command.stored import key_of, of_run
from mtrl.config.overrides import normalise
from mtrl.errors import UserError

READ = ("reward", "environment", "data", "evaluation.success_threshold", "generator.max_turns", "plugins")
"""Keys and sections that a rescoring reads. For a run, overrides of other keys are rejected because they have no
effect."""


def configuration(run: Path | None, overrides: Sequence[str]) -> tuple[DictConfig, list[str]]:
    """Return the checked configuration, and warnings.

    Raises:
        UserError: the configuration is invalid, or an override has no effect.
    """
    if run is None:
        cfg = merge(normalise(overrides))
    else:
        for override in overrides:
            check_read(override)
        cfg = of_run(run, overrides)
    return cfg, check(cfg)


def check_read(override: str) -> None:
    """Check that a rescoring reads the key of the override.

    Raises:
        UserError: the override would have no effect.
    """
    key = key_of(override)
    if not any(key == read or key.startswith(f"{read}.") for read in READ):
        raise UserError(f"{override} changes nothing here: rescoring a run reads {', '.join(READ)}")
