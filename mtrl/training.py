"""One training run as a command starts it: check the configuration, show it, train, and return the objective."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from mtrl.command.checks import ready

if TYPE_CHECKING:
    from mtrl.trainer.hooks import OnEvaluation


def start(cfg: DictConfig, on_evaluation: OnEvaluation | None = None, overrides: Sequence[str] = ()) -> float | None:
    """Check the composed configuration of a run, then train. Return the objective as `run` does.

    Args:
        on_evaluation: function that is called after each evaluation.
        overrides: the overrides of the run, for warnings about those without an effect.

    Raises:
        UserError: the configuration cannot run, or the run ended with an error of the user's.
    """
    warn(ready(cfg, overrides))
    return run(cfg, on_evaluation)


def warn(warnings: Iterable[str]) -> None:
    """Print each warning to stderr."""
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)


def run(cfg: DictConfig, on_evaluation: OnEvaluation | None = None) -> float | None:
    """Show the checked configuration and train. Return the objective of a sweep, `summary[objective]`, or None if the
    summary has none.

    Raises:
        UserError: the run ended with an error of the user's.
    """
    from mtrl.command.show import show

    show(cfg)

    from mtrl.doctor.at_start import plan_at_start
    from mtrl.preflight.at_start import check_at_start
    from mtrl.trainer.hooks import Hooks, nothing
    from mtrl.trainer.run import train

    summary = train(cfg, Hooks(check_at_start, plan_at_start, on_evaluation or nothing))
    value = summary.get(cfg.objective)
    return None if value is None else float(value)
