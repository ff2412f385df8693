"""One training run as the command starts it: check and show the configuration, train, and return the objective."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from mtrl.command.checks import check
from mtrl.command.engine_checks import check_sampling
from mtrl.command.hints import training_hints
from mtrl.command.runs import settle

if TYPE_CHECKING:
    from mtrl.trainer.hooks import OnEvaluation


def start(cfg: DictConfig, on_evaluation: OnEvaluation | None = None) -> float | None:
    """Check and show the configuration, then train. Return the objective of a sweep, `summary[objective]`, or None if
    the summary has none.

    Args:
        cfg: the composed configuration of the run.
        on_evaluation: function that is called after each evaluation.

    Raises:
        UserError: the configuration cannot run, or the run ended with an error of the user's.
    """
    from mtrl.command.show import show

    check_sampling(cfg)
    for warning in [*settle(cfg), *check(cfg), *training_hints(cfg)]:
        print(f"warning: {warning}", file=sys.stderr)
    show(cfg)

    from mtrl.preflight.at_start import check_at_start
    from mtrl.trainer.hooks import Hooks, nothing
    from mtrl.trainer.run import train

    summary = train(cfg, Hooks(check_at_start, on_evaluation or nothing))
    value = summary.get(cfg.objective)
    return None if value is None else float(value)
