"""Python API for training runs and evaluations, for example in a notebook: the commands as two classes.

    from mtrl.api import MultiTurnRLEvaluator, MultiTurnRLTrainer

    trainer = MultiTurnRLTrainer(recipe="gsm8k", overrides={"trainer.max_steps": 20})
    trainer.train()["success_greedy_after"]
    MultiTurnRLEvaluator(model=trainer, evaluate_base_model=True).evaluate()

Names follow SageMaker AI's SDK where it has the same concept; `service_keys` handles the other arguments of that SDK.
Each object runs its `command` as a separate process, because a notebook already has an event loop, and because the
GPU is free again when the process has ended.
"""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from mtrl.command.runs import claim
from mtrl.config.outputs import is_address
from mtrl.config.overrides import CONF, written
from mtrl.errors import UserError
from mtrl.record.run_dir import RunDir
from mtrl.utils.files import in_home

Overrides = Mapping[str, Any]
"""Configuration keys, such as `trainer.max_steps`, and their values."""


class MultiTurnRLTrainer:
    """One training run.

    Args:
        recipe: an experiment of `conf/experiment/`; empty: gsm8k.
        model: a Hugging Face folder or Hub name; None: the model of the recipe.
        agent_env: `package.module.Class` of an environment or task family; None: the environment of the recipe.
        agent: an agent program that runs the episodes instead: `package.module.function`, or the URL of a service.
        training_dataset: file, folder or Hub name with the rows.
        dataset: the same as `training_dataset`.
        overrides: any other keys; they take precedence over the arguments above. None is null.
        run_dir: folder of the run; None creates one in `outputs/`.
        service: other arguments of SageMaker AI's SDK; see `service_keys`.

    Raises:
        UserError: an argument of the service is not supported on this machine.
    """

    def __init__(
        self,
        recipe: str = "gsm8k",
        *,
        model: str | None = None,
        agent_env: str | None = None,
        agent: str | None = None,
        training_dataset: str | None = None,
        dataset: str | None = None,
        overrides: Overrides | None = None,
        run_dir: str | Path | None = None,
        **service: Any,
    ):
        recipe, overrides = recipe or "gsm8k", dict(overrides or {})
        run_dir = overrides.pop("run_dir", None) or run_dir or output_folder(service, "run_dir")
        folder = f"outputs/{overrides.get('name', recipe)}/{datetime.now():%Y-%m-%d_%H-%M-%S}"
        self.run = RunDir(claim(folder) if run_dir is None else in_home(run_dir))
        own = {
            "experiment": recipe,
            "model.path": model,
            "environment.target": agent_env,
            **agent_key(agent),
            "data.path": training_dataset or dataset or None,
            **service_keys(service),
        }
        keys = {**given(own), **overrides, "run_dir": str(self.run.path)}
        self.command = command("mtrl.main", {"model": "hf", **keys} if model else keys)

    def train(self, show: Callable[[str], object] = print) -> dict[str, Any]:
        """Train, or resume where an earlier call was interrupted. Return the contents of summary.json.

        Args:
            show: function that is called with every line that the run prints.

        Raises:
            UserError: the run ended with an error; the message holds the last line that it printed.
        """
        again = ["resume=latest"] if self.run.metrics.exists() else []
        run_command([*self.command, *again], show)
        return json.loads(self.run.summary.read_text(encoding="utf-8"))

    def check_begun(self) -> None:
        """Check that the run has begun.

        Raises:
            UserError: the run has no configuration yet.
        """
        if not self.run.config.is_file():
            raise UserError(f"the run in {self.run} has not begun; call train() first")

    def get_mlflow_url(self) -> str:
        """Return the URL of the run in MLflow, or the address of the server until the run appears there.

        Raises:
            UserError: the run has not begun, or it does not report to MLflow.
        """
        from mtrl.command.stored import of_run
        from mtrl.trackers import mlflow_url

        self.check_begun()
        config: Any = OmegaConf.to_object(of_run(self.run.path, []))
        if "mlflow" not in config.tracker.report_to:
            raise UserError(
                f"the run in {self.run} does not report to MLflow; give overrides={{'tracker.report_to': ['mlflow']}}, "
                f"or send it now: mtrl track {self.run} --to mlflow"
            )
        return mlflow_url(config, self.run)


class Report(dict[str, Any]):
    """Contents of report.json of an evaluation, which has ended when `evaluate` returns."""

    def wait(self) -> Report:
        """Return at once, since the evaluation has already ended. The method exists for compatibility with SageMaker
        AI's SDK."""
        return self


class MultiTurnRLEvaluator:
    """One evaluation on held-out rows.

    Args:
        model: a trainer, the folder of a run, a checkpoint, a model folder or a Hub name.
        recipe: the experiment to evaluate on, for a model that does not come from a run and so has no configuration.
        dataset: file, folder or Hub name with the rows; None or empty: the data of the recipe.
        evaluate_base_model: compare with the policy before training, on the same rows.
        success_threshold: score from which an episode is a success; None: the recipe's threshold.
        overrides: any other keys; None is null.
        output: folder of the report; None creates one in `outputs/evaluations/`.
        service: other arguments of SageMaker AI's SDK; see `service_keys`.

    Raises:
        UserError: the model has no configuration and no recipe is given, or an argument of the service is not supported
            on this machine.
    """

    def __init__(
        self,
        model: MultiTurnRLTrainer | str | Path,
        *,
        recipe: str | None = None,
        dataset: str | None = None,
        evaluate_base_model: bool = False,
        success_threshold: float | None = None,
        overrides: Overrides | None = None,
        output: str | Path | None = None,
        **service: Any,
    ):
        overrides = dict(overrides or {})
        output = overrides.pop("evaluation.output", None) or output or output_folder(service, "output")
        own = {
            "data.path": dataset or None,
            "evaluation.success_threshold": success_threshold,
            **service_keys(service),
        }
        keys = {**given(own), **overrides}
        recipe = recipe or keys.pop("experiment", None)
        self.evaluate_base_model = evaluate_base_model
        self.trainer = model if isinstance(model, MultiTurnRLTrainer) else None
        self.model = str(model) if self.trainer is None else str(self.trainer.run.path)
        if recipe is None and self.trainer is None:
            check_is_run(self.model)
        folder = f"outputs/evaluations/{datetime.now():%Y-%m-%d_%H-%M-%S}"
        self.output = Path(claim(folder)) if output is None else in_home(output)
        keys["evaluation.output"] = str(self.output)
        if recipe is not None:
            keys = {"experiment": recipe, "evaluation.model": self.model, **keys}
        self.command = command("mtrl.evaluate", keys)
        if recipe is None:
            self.command.append(self.model)

    def evaluate(self, evaluate_base_model: bool = False, show: Callable[[str], object] = print) -> Report:
        """Run and score the episodes and write the report. Return the contents of report.json.

        Args:
            evaluate_base_model: as in the constructor.
            show: function that is called with every line that the evaluation prints.

        Raises:
            UserError: the evaluation ended with an error, whose last lines are the message, or the trainer's run
                has not begun.
        """
        if self.trainer is not None:
            self.trainer.check_begun()
        is_compared = evaluate_base_model or self.evaluate_base_model
        compared = [override("evaluation.compare", ["base"])] if is_compared else []
        run_command([*self.command, *compared], show)
        return Report(json.loads((self.output / "report.json").read_text(encoding="utf-8")))


def check_is_run(model: str, argument: str = "recipe") -> None:
    """Check that the model belongs to a run, whose configuration names the task.

    Args:
        argument: the argument that names the task of any other model.

    Raises:
        UserError: the model does not exist, or does not belong to a run.
    """
    from mtrl.evaluation.sources import HUB_NAME, run_of

    path = in_home(model)
    if run_of(path) is None:
        is_path = "/" in model and "://" not in model and (not HUB_NAME.fullmatch(model) or path.parent.is_dir())
        if is_path and not path.exists():
            raise UserError(f"model={model} does not exist; name a run, its folder, a checkpoint or a model folder")
        recipes = ", ".join(sorted(file.stem for file in (CONF / "experiment").glob("*.yaml")))
        raise UserError(
            f"model={model} does not belong to a run, so it has no task; give {argument}=NAME as well, one of {recipes}"
        )


def service_keys(service: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration keys for arguments of SageMaker AI's SDK that have another name here.

    `agent_config` is the agent program (a function or the URL of a service), `mlflow_resource_arn` the MLflow server
    that receives the metrics. `role` and `accept_eula` belong to jobs on AWS; here they have no effect and cause a
    warning.

    Raises:
        UserError: only AWS can reach the agent.
        TypeError: an argument is unknown.
    """
    known = ("agent_config", "mlflow_resource_arn", "role", "accept_eula")
    if unknown := sorted(service.keys() - set(known)):
        raise TypeError(f"{unknown[0]} is no argument; those of SageMaker AI's SDK that are taken: {', '.join(known)}")
    for name in service.keys() & {"role", "accept_eula"}:
        warnings.warn(
            f"{name}={service[name]} has no effect: the command runs on this machine; `scripts/launch_sagemaker.py` "
            "starts it as a job of SageMaker AI",
            stacklevel=3,
        )
    agent, server = service.get("agent_config"), service.get("mlflow_resource_arn")
    if str(agent).startswith("arn:"):
        raise UserError(
            f"agent_config={agent} is an agent that only a job on AWS can call; give package.module.function or the "
            "URL of its service, or start the job: docs/sagemaker.md"
        )
    tracked = {"tracker.report_to": ["mlflow"], "tracker.mlflow.uri": server} if server else {}
    return {**agent_key(agent), **tracked}


def output_folder(service: dict[str, Any], ours: str) -> str | None:
    """Remove `s3_output_path` from the arguments of the service and return it: a folder of this machine, or None.

    Args:
        ours: name of the argument for the folder in this API, for the error message.

    Raises:
        UserError: `s3_output_path` is a URL.
    """
    path = service.pop("s3_output_path", None)
    if is_address(path):
        raise UserError(
            f"s3_output_path={path} is an address, and results are written to folders of this machine; give "
            f"{ours}=FOLDER, and copy it when the command has ended"
        )
    return path or None


def agent_key(agent: str | None) -> dict[str, str]:
    """Return the configuration key for an agent program, which is a function or the URL of a service."""
    return {f"generator.agent.{'url' if '://' in agent else 'target'}": agent} if agent else {}


def given(arguments: Overrides) -> dict[str, Any]:
    """Return the keys of the arguments that were given. None leaves an argument out, whereas the None of an override is
    the value null."""
    return {key: value for key, value in arguments.items() if value is not None}


def command(module: str, keys: Overrides) -> list[str]:
    """Return the command line for these keys."""
    return [sys.executable, "-m", module, *(override(key, value) for key, value in keys.items())]


def override(key: str, value: Any) -> str:
    """Return `key=value` in Hydra's grammar, with texts quoted so that Hydra reads them unchanged."""
    return f"{key}={written(value)}"


def run_command(words: list[str], show: Callable[[str], object]) -> None:
    """Run the command (`command`) until it ends, or until this process ends, when it gets SIGTERM. Each Ctrl-C is
    forwarded to the command as SIGINT: at the first one it saves, at the second one it ends at once.

    Raises:
        UserError: the exit status is not 0.
    """
    last = ""
    python, flag, *module = words
    process = subprocess.Popen(
        [python, flag, "mtrl.command.attached", *module],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # terminals and Jupyter signal the group, so the command would get two signals for one
    )
    try:
        for line in process.stdout or ():
            show(line.rstrip("\n"))
            last = line.strip() or last
    except BaseException:
        interrupt(process)
        raise
    if status := process.wait():
        raise UserError(f"{shlex.join(words[1:])} ended with {status}: {last}")


def interrupt(process: subprocess.Popen[str]) -> None:
    """Send SIGINT to a command, again at each further Ctrl-C, and wait until it ends. Its output is read and discarded,
    because a command whose pipe is full does not end."""
    while True:
        process.send_signal(signal.SIGINT)
        try:
            for _ in process.stdout or ():
                pass
            process.wait()
            return
        except KeyboardInterrupt:
            continue
