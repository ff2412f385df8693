"""A sweeper for Hydra: Optuna proposes the values of each job, and prunes unpromising jobs.

The module is not in `mtrl`, because Hydra finds plugins only in modules below `hydra_plugins`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override
from hydra.core.plugins import Plugins
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from mtrl.config.keys import find
from mtrl.errors import Interrupted, UserError
from mtrl.sweep.outcome import read_outcome
from mtrl.sweep.study import open_study


class OptunaSweeper(Sweeper):
    """The sweeper of `hydra/sweeper=mtrl_optuna`; conf/hydra/sweeper/mtrl_optuna.yaml explains its keys.

    The plugin `hydra-optuna-sweeper` needs Optuna 2, and cannot prune, because its jobs do not know their trial.
    """

    def __init__(self, n_trials: int, n_jobs: int, **_: Any):
        """Store the numbers of trials and jobs. `open_study` reads the other keys, also in the jobs."""
        self.n_trials, self.n_jobs = n_trials, n_jobs

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.hydra_context, self.config = hydra_context, config
        self.launcher: Launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> None:
        """Run the trials, `n_jobs` at a time; trials that were running when the sweep was stopped come first."""
        from optuna.trial import TrialState

        overrides = OverridesParser.create(config_loader=self.hydra_context.config_loader).parse_overrides(arguments)
        fixed = [override.input_line or "" for override in overrides if not override.is_sweep_override()]
        space = {o.get_key_element(): distribution(o) for o in overrides if o.is_sweep_override()}
        self.folder = Path(self.config.hydra.sweep.dir)
        self.folder.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(self.config, self.folder / "multirun.yaml")
        self.study, _ = open_study(self.folder, self.config.hydra.sweeper)
        for number in [t.number for t in self.study.get_trials(states=(TrialState.RUNNING,))]:
            self._run([number], fixed, space)
        while (left := self.n_trials - len(self.study.get_trials(deepcopy=False))) > 0:
            self._run([self._ask(space) for _ in range(min(left, self.n_jobs))], fixed, space)

    def _ask(self, space: dict[str, Any]) -> int:
        try:
            return self.study.ask(space).number
        except ValueError as error:
            raise UserError(f"{self.folder} holds a sweep of other values ({error}); name another run_dir") from error

    def _run(self, numbers: Sequence[int], fixed: list[str], space: dict[str, Any]) -> None:
        """Run trials of consecutive numbers; a job has the number of its trial."""
        tried = [self.study.trials[number].params for number in numbers]
        jobs = [[*fixed, *(f"{key}={params[key]}" for key in space)] for params in tried]
        self.validate_batch_is_legal(jobs)
        self.launcher.launch(jobs, initial_job_idx=numbers[0])
        for number in numbers:
            self._tell(number)

    def _tell(self, number: int) -> None:
        """Report the outcome of a job to the study.

        Raises:
            Interrupted: a signal has ended the job, and with it the sweep; its trial stays in the state running.
        """
        from optuna.trial import TrialState

        outcome = read_outcome(self.folder / str(number))
        if outcome is not None and outcome.status == "pruned":
            self.study.tell(number, state=TrialState.PRUNED)
        elif outcome is not None and outcome.status == "finished" and outcome.value is not None:
            self.study.tell(number, outcome.value)
        elif outcome is not None and outcome.status == "interrupted":
            raise Interrupted(outcome.said)
        else:
            self.study.tell(number, state=TrialState.FAIL)


def distribution(override: Override) -> Any:
    """Return the distribution of `key=a,b,c`, `key=range(1,5)`, `key=interval(0,1)` or
    `key=tag(log,interval(1e-6,1e-3))`. An interval of an integer key contains integers.

    Raises:
        UserError: the override is another kind of sweep.
    """
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    value = override.value()
    if isinstance(value, IntervalSweep):
        known, is_log = find(override.key_or_group), "log" in value.tags
        if known is not None and known.type is int:
            return IntDistribution(int(value.start), int(value.end), log=is_log)
        return FloatDistribution(value.start, value.end, log=is_log)
    if override.is_discrete_sweep():
        return CategoricalDistribution(list(override.sweep_string_iterator()))
    raise UserError(f"{override.input_line} is nothing that Optuna samples; write a list of values, or interval(a,b)")
