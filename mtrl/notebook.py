"""The functions of `import mtrl`, for notebooks and scripts::

    import mtrl

    run = mtrl.train("gsm8k", "trainer.max_steps=20", seed=1)
    run.summary["success_after"]
    mtrl.evaluate(run)["models"]
    mtrl.load("outputs/gsm8k/RUN").series("rollout/success/mean")

Training and evaluation run as processes of their own, as the commands do; nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mtrl.api import MultiTurnRLEvaluator, MultiTurnRLTrainer, check_is_run
from mtrl.config.keys import flat
from mtrl.errors import UserError
from mtrl.record.run import Run
from mtrl.utils.files import in_home

Show = Callable[[str], object]


def load(run: str | Path) -> Run:
    """Return the run in a folder.

    Raises:
        UserError: the folder holds no run, or its files cannot be read.
    """
    found = Run.open(in_home(run))
    found.rows, found.settings  # noqa: B018 - a damaged file is reported here
    return found


def train(experiment: str = "gsm8k", *overrides: str, show: Show = print, **keys: Any) -> Run:
    """Train as `mtrl train experiment=EXPERIMENT OVERRIDES` does, and return the run.

    Args:
        experiment: an experiment of `conf/experiment/`.
        overrides: `key=value` as on the command line.
        show: function that is called with every line that the run prints.
        keys: keys and values; a dict is a section, of which it changes the keys that it names, as in
            `trainer={"max_steps": 20}`.

    Raises:
        UserError: the run ended with an error; the message holds the last line that it printed. Or an override names
            `run_dir`, which is an argument, or is an option such as `-m`.
    """
    check_overrides(overrides, "run_dir", "run_dir=FOLDER")
    trainer = MultiTurnRLTrainer(experiment, overrides=flat(keys, keep_empty=True))
    trainer.command += overrides
    trainer.train(show)
    return load(trainer.run.path)


def evaluate(
    model: Run | str | Path, *overrides: str, compare_base: bool = False, show: Show = print, **keys: Any
) -> dict[str, Any]:
    """Evaluate a model on held-out rows as `mtrl evaluate MODEL OVERRIDES` does. Return the contents of
    report.json.

    Args:
        model: a run, its folder, a checkpoint, a model folder or a Hub name; without a run it needs `experiment=NAME`.
        overrides: `key=value` as on the command line.
        compare_base: compare with the policy before training, on the same rows.
        show: function that is called with every line that the evaluation prints.
        keys: keys and values; a dict is a section.

    Raises:
        UserError: the evaluation ended with an error, the model does not exist, it belongs to no run and no
            experiment is given, or an override names `evaluation.output`, which is an argument, or is an option.
    """
    check_overrides(overrides, "evaluation.output", "evaluation={'output': FOLDER}")
    path = model.path if isinstance(model, Run) else model
    experiment = keys.pop("experiment", None)
    if experiment is None:
        check_is_run(str(path), "experiment")
    settings = flat(keys, keep_empty=True)
    evaluator = MultiTurnRLEvaluator(path, recipe=experiment, evaluate_base_model=compare_base, overrides=settings)
    evaluator.command += overrides
    return dict(evaluator.evaluate(show=show))


def check_overrides(overrides: Sequence[str], key: str, argument: str) -> None:
    """Check that the command does what the function waits for: that no override names the folder of the results, which
    are read in the folder of the argument, and none is an option, such as `-m`, with which the command does other work.

    Raises:
        UserError: an override sets `key`, or is an option other than `--config-dir`.
    """
    for word in overrides:
        if word.lstrip("+").startswith(f"{key}="):
            raise UserError(f"{word} names a folder in which the results are not read; give {argument} as an argument")
        if word.startswith("-") and not word.startswith(("--config-dir", "-cd")):
            raise UserError(
                f"{word} is an option of the command, which would leave no result of one run; give overrides key=value,"
                " and run sweeps by the command: mtrl train -m"
            )
