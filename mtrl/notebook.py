"""The functions of `import mtrl`, for notebooks and scripts::

    import mtrl

    run = mtrl.train("gsm8k", "trainer.max_steps=20", seed=1)
    run.summary["success_after"]
    mtrl.evaluate(run)["models"]
    mtrl.load("outputs/gsm8k/RUN").series("rollout/success/mean")

Training and evaluation run as processes of their own, as the commands do; nothing here imports torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from mtrl.api import MultiTurnRLEvaluator, MultiTurnRLTrainer
from mtrl.config.keys import flat
from mtrl.config.plain_yaml import read_config
from mtrl.errors import UserError
from mtrl.record.metrics import MetricsLog
from mtrl.record.run_dir import RunDir, such_as
from mtrl.record.stored import read
from mtrl.types import Trajectory

Show = Callable[[str], object]


@dataclass(frozen=True)
class Run:
    """A run, read from its folder; a run that goes on shows what it has written so far."""

    path: Path

    @property
    def folder(self) -> RunDir:
        return RunDir(self.path)

    @cached_property
    def config(self) -> dict[str, Any]:
        """The configuration by dotted key."""
        return flat(read_config(self.folder.config))

    @property
    def summary(self) -> dict[str, Any]:
        """The contents of summary.json; empty before the end of the run."""
        summary = self.folder.summary
        return json.loads(summary.read_text(encoding="utf-8")) if summary.is_file() else {}

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """One row of metrics per step, for example for `pandas.DataFrame`."""
        return MetricsLog(self.folder.metrics).read()

    def series(self, key: str) -> dict[int, float]:
        """Return step -> value of one metric, for the steps that have a finite value."""
        values = {row["step"]: row.get(key) for row in self.metrics}
        return {
            step: float(value)
            for step, value in values.items()
            if isinstance(value, int | float) and math.isfinite(value)
        }

    def trajectories(self, kind: str = "train") -> Iterator[Trajectory]:
        """Yield the stored trajectories of a kind: train, disagree, eval_greedy or eval_sampled. Lines that cannot be
        read are left out."""
        for file in sorted(self.folder.trajectories.glob(f"{kind}_*.jsonl")):
            yield from (stored.trajectory for stored in read(file) if stored.trajectory is not None)


def load(run: str | Path) -> Run:
    """Return the run in a folder.

    Raises:
        UserError: the folder holds no run.
    """
    path = Path(run).expanduser()
    if not RunDir(path).config.is_file():
        raise UserError(f"{path} is no run, for it has no config.yaml; give the folder of a run{such_as(path)}")
    return Run(path)


def train(experiment: str = "gsm8k", *overrides: str, show: Show = print, **keys: Any) -> Run:
    """Train as `python -m mtrl.main experiment=EXPERIMENT OVERRIDES` does, and return the run.

    Args:
        experiment: an experiment of `conf/experiment/`.
        overrides: `key=value` as on the command line.
        show: function that is called with every line that the run prints.
        keys: keys and values; a dict is a section, as in `trainer={"max_steps": 20}`.

    Raises:
        UserError: the run ended with an error; the message holds the last line that it printed.
    """
    run_dir = keys.pop("run_dir", None)
    trainer = MultiTurnRLTrainer(experiment, overrides=flat(keys), run_dir=run_dir)
    trainer.command += overrides
    trainer.train(show)
    return load(trainer.run.path)


def evaluate(
    model: Run | str | Path, *overrides: str, compare_base: bool = False, show: Show = print, **keys: Any
) -> dict[str, Any]:
    """Evaluate a model on held-out rows as `python -m mtrl.evaluate MODEL OVERRIDES` does. Return the contents of
    report.json.

    Args:
        model: a run, its folder, a checkpoint, a model folder or a Hub name; without a run it needs `experiment=NAME`.
        overrides: `key=value` as on the command line.
        compare_base: compare with the policy before training, on the same rows.
        show: function that is called with every line that the evaluation prints.
        keys: keys and values; a dict is a section.

    Raises:
        UserError: the evaluation ended with an error, or the model belongs to no run and no experiment is given.
    """
    path = model.path if isinstance(model, Run) else model
    experiment = keys.pop("experiment", None)
    evaluator = MultiTurnRLEvaluator(path, recipe=experiment, evaluate_base_model=compare_base, overrides=flat(keys))
    evaluator.command += overrides
    return dict(evaluator.evaluate(show=show))
