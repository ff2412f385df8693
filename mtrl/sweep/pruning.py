"""Pruning: an Optuna sweep ends a job early if its score is less promising than those of other jobs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from mtrl.errors import PrunedError, UserError
from mtrl.sweep.study import TARGET, open_study

if TYPE_CHECKING:
    from mtrl.trainer.hooks import OnEvaluation

MEASURED = {"success_after": "val/success/mean", "reward_after": "val/reward/mean"}
"""Metric of every evaluation, by the key of summary.json that holds its last value."""


def pruner_of(cfg: DictConfig) -> OnEvaluation | None:
    """Return the callback that a job of an Optuna sweep calls after each evaluation; None in other sweeps.

    Raises:
        UserError: no evaluation measures the objective, or the run counts epochs, so that it cannot be pruned.
    """
    hydra = HydraConfig.get()
    if hydra.sweeper._target_ != TARGET or hydra.sweeper.pruner is None:
        return None
    check_objective(cfg.objective)
    if cfg.trainer.epochs is not None:
        raise UserError(
            f"trainer.epochs={cfg.trainer.epochs:g} cannot be pruned, for the sweep's pruner counts steps; set "
            "trainer.max_steps"
        )
    folder = Path(hydra.runtime.output_dir).parent
    return Pruner(folder, hydra.sweeper, hydra.job.num, MEASURED[cfg.objective], cfg.trainer.max_steps)


class Pruner:
    """Reports the scores of a job to the study of a sweep, and ends the job if the study's pruner decides so.

    The job may run in another process or on another machine than the sweep: both use the file of the study.
    """

    def __init__(self, folder: Path, sweeper: DictConfig, number: int, key: str, last: int):
        """
        Args:
            number: number of the job, which is also the number of its trial.
            key: the metric to report.
            last: the last step of the job, at which pruning would save nothing.
        """
        self.study, self.storage = open_study(folder, sweeper)
        study_id = self.storage.get_study_id_from_name(self.study.study_name)
        self.trial_id = self.storage.get_trial_id_from_study_id_trial_number(study_id, number)
        self.key, self.last = key, last

    def __call__(self, step: int, row: dict[str, Any]) -> None:
        """Report the score of an evaluation.

        Raises:
            PrunedError: the study's pruner ends the job.
        """
        score = row.get(self.key)
        if score is None or not 0 < step < self.last:  # at step 0 no training has been done
            return
        known = self.storage.get_trial(self.trial_id)
        if known.state.is_finished():
            return
        self.storage.set_trial_intermediate_value(self.trial_id, step, float(score))
        if self.study.pruner.prune(self.study, self.storage.get_trial(self.trial_id)):
            raise PrunedError(f"{self.key} is {score:.4g} at step {step}, where other jobs did better", float(score))


def check_objective(objective: str) -> None:
    """Check that a job can be pruned by this objective.

    Raises:
        UserError: no evaluation of a run measures the objective.
    """
    if objective not in MEASURED:
        raise UserError(
            f"objective={objective} is not measured before a run ends, so no job can be pruned by it; set "
            f"objective={next(iter(MEASURED))}, or hydra.sweeper.pruner=null"
        )
