"""Runs and evaluations from Python, a notebook for one: what the command line does, as two objects.

    from mtrl.api import MultiTurnRLEvaluator, MultiTurnRLTrainer

    trainer = MultiTurnRLTrainer(recipe="gsm8k", overrides={"trainer.max_steps": 20})
    trainer.train()["success_greedy_after"]
    MultiTurnRLEvaluator(model=trainer, evaluate_base_model=True).evaluate()

Names are those of SageMaker AI's SDK where it has the same thing, and its other arguments are taken or answered by
`service_keys`. Each object starts the command that `command` holds as a process of its own: a notebook has an event
loop already, and a GPU is free again afterwards.
"""

from __future__ import annotations

import json
import re
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

from mtrl.config.outputs import is_address
from mtrl.config.overrides import CONF, quoted
from mtrl.config.runs import claim
from mtrl.errors import UserError
from mtrl.tracking.run_dir import RunDir

PLAIN = re.compile(r"(?!(?i:null|true|false|nan|inf)$)[A-Za-z_][\w./-]*")
"""Texts that need no quotes."""
Overrides = Mapping[str, Any]
"""Keys of the configuration, `trainer.max_steps` for one, and their values."""


class MultiTurnRLTrainer:
    """One run.

    Args:
        recipe: an experiment of `conf/experiment/`; empty: gsm8k.
        model: a Hugging Face folder or Hub name; None is the recipe's.
        agent_env: `package.module.Class` of an environment or task family; None is the recipe's.
        agent: a program that plays instead: `package.module.function`, or the URL of a service.
        training_dataset: file, folder or Hub name with the rows.
        dataset: the same as `training_dataset`.
        overrides: any other keys; they come last.
        run_dir: folder of the run; None makes one in `outputs/`.
        service: other arguments of SageMaker AI's SDK; see `service_keys`.

    Raises:
        UserError: an argument of the service that this machine cannot serve.
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
        recipe, run_dir = recipe or "gsm8k", run_dir or output_folder(service, "run_dir")
        name = (overrides or {}).get("name", recipe)
        folder = f"outputs/{name}/{datetime.now():%Y-%m-%d_%H-%M-%S}" if run_dir is None else str(run_dir)
        self.run = RunDir(Path(claim(folder) if run_dir is None else folder))
        keys = {
            "experiment": recipe,
            "model.path": model,
            "environment.target": agent_env,
            **played_by(agent),
            "data.path": training_dataset or dataset or None,
            **service_keys(service),
            **(overrides or {}),
            "run_dir": str(self.run.path),
        }
        self.command = command("mtrl.main", {"model": "hf", **keys} if model else keys)

    def train(self, show: Callable[[str], object] = print) -> dict[str, Any]:
        """Train, or go on where an earlier call was interrupted; what summary.json holds.

        Args:
            show: is given every line that the run writes.

        Raises:
            UserError: the run ended with an error, and its last words.
        """
        again = ["resume=latest"] if self.run.metrics.exists() else []
        run_command([*self.command, *again], show)
        return json.loads(self.run.summary.read_text(encoding="utf-8"))

    def check_begun(self) -> None:
        """
        Raises:
            UserError: nothing was trained yet.
        """
        if not self.run.config.is_file():
            raise UserError(f"the run in {self.run} has not begun; call train() first")

    def get_mlflow_url(self) -> str:
        """Where the run is in MLflow; before it has arrived there, the address of the server.

        Raises:
            UserError: the run has not begun, or it does not report to MLflow.
        """
        from mtrl.config.stored import of_run
        from mtrl.tracking.followers import mlflow_url

        self.check_begun()
        config: Any = OmegaConf.to_object(of_run(self.run.path, []))
        if "mlflow" not in config.tracker.report_to:
            raise UserError(
                f"the run in {self.run} does not report to MLflow; give overrides={{'tracker.report_to': ['mlflow']}}, "
                f"or send it now: python -m mtrl.track {self.run} --to mlflow"
            )
        return mlflow_url(config, self.run)


class Report(dict[str, Any]):
    """report.json of an evaluation, which is over when `evaluate` returns."""

    def wait(self) -> Report:
        """Return at once: what SageMaker AI's SDK waits for has ended already."""
        return self


class MultiTurnRLEvaluator:
    """One evaluation on held-out rows.

    Args:
        model: a trainer, the folder of a run, a checkpoint, a model folder or a Hub name.
        recipe: the experiment to play; needed where the model is not a run's, which brings its own.
        dataset: file, folder or Hub name with the rows; None or empty: the recipe's.
        evaluate_base_model: compare with the policy before training, on the same rows.
        success_threshold: score from which an episode is a success; None: the recipe's.
        overrides: any other keys.
        output: folder of the report; None makes one in `outputs/evaluations/`.
        service: other arguments of SageMaker AI's SDK; see `service_keys`.

    Raises:
        UserError: a model without a task, or an argument of the service that this machine cannot serve.
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
        output = output or output_folder(service, "output")
        keys = {
            "data.path": dataset or None,
            "evaluation.success_threshold": success_threshold,
            **service_keys(service),
            **(overrides or {}),
        }
        recipe = recipe or keys.pop("experiment", None)
        self.evaluate_base_model = evaluate_base_model
        self.trainer = model if isinstance(model, MultiTurnRLTrainer) else None
        self.model = str(model) if self.trainer is None else str(self.trainer.run.path)
        if recipe is None and self.trainer is None:
            check_is_run(self.model)
        folder = f"outputs/evaluations/{datetime.now():%Y-%m-%d_%H-%M-%S}" if output is None else str(output)
        self.output = Path(claim(folder) if output is None else folder)
        keys["evaluation.output"] = str(self.output)
        if recipe is not None:
            keys = {"experiment": recipe, "evaluation.model": self.model, **keys}
        self.command = command("mtrl.evaluate", keys)
        if recipe is None:
            self.command.append(self.model)

    def evaluate(self, evaluate_base_model: bool = False, show: Callable[[str], object] = print) -> Report:
        """Play, score, and write the report; what report.json holds.

        Args:
            evaluate_base_model: as in the constructor.
            show: is given every line that the evaluation writes.

        Raises:
            UserError: it ended with an error, and its last words; or the trainer that is evaluated has not trained.
        """
        if self.trainer is not None:
            self.trainer.check_begun()
        is_compared = evaluate_base_model or self.evaluate_base_model
        compared = [override("evaluation.compare", ["base"])] if is_compared else []
        run_command([*self.command, *compared], show)
        return Report(json.loads((self.output / "report.json").read_text(encoding="utf-8")))


def check_is_run(model: str) -> None:
    """
    Raises:
        UserError: the model is not a run's, so that no configuration says what it is to play.
    """
    from mtrl.evaluate.sources import run_of

    if run_of(Path(model).expanduser()) is None:
        recipes = ", ".join(sorted(file.stem for file in (CONF / "experiment").glob("*.yaml")))
        raise UserError(
            f"model={model} is not of a run, so it brings no task that it could play; give recipe=NAME as well, one of "
            f"{recipes}"
        )


def service_keys(service: dict[str, Any]) -> dict[str, Any]:
    """Keys of the configuration for arguments of SageMaker AI's SDK that have another name here.

    `agent_config` is a function or the URL of a service that plays, `mlflow_resource_arn` the MLflow server that the
    record goes to. `role` and `accept_eula` are of a job on AWS and have no effect here, which is warned of.

    Raises:
        UserError: an agent that only AWS can reach.
        TypeError: there is no such argument.
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
    return {**played_by(agent), **tracked}


def output_folder(service: dict[str, Any], ours: str) -> str | None:
    """Take `s3_output_path` out of the arguments of the service: a folder of this machine.

    Args:
        ours: the argument that names the folder here.

    Raises:
        UserError: it is an address.
    """
    path = service.pop("s3_output_path", None)
    if is_address(path):
        raise UserError(
            f"s3_output_path={path} is an address, and results are written to folders of this machine; give "
            f"{ours}=FOLDER, and copy it when the command has ended"
        )
    return path or None


def played_by(agent: str | None) -> dict[str, str]:
    """The key for a program that plays in the environment's place: a function or the URL of a service."""
    return {f"generator.agent.{'url' if '://' in agent else 'target'}": agent} if agent else {}


def command(module: str, keys: Overrides) -> list[str]:
    """What to type for these keys; those that are None are left out."""
    return [sys.executable, "-m", module, *(override(key, value) for key, value in keys.items() if value is not None)]


def override(key: str, value: Any) -> str:
    """`key=value` as Hydra reads it: texts stay what they are, whatever is in them."""
    return f"{key}={_written(value)}"


def _written(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_written(of_key)}" for key, of_key in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(_written, value)) + "]"
    if isinstance(value, str | Path) and not PLAIN.fullmatch(str(value)):
        return quoted("", str(value))[1:]
    return value if isinstance(value, str) else json.dumps(value, default=str)


def run_command(words: list[str], show: Callable[[str], object]) -> None:
    """Run it to its end; Ctrl-C reaches it, and it saves.

    Raises:
        UserError: its exit status is not 0.
    """
    last = ""
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    try:
        for line in process.stdout or ():
            show(line.rstrip("\n"))
            last = line.strip() or last
    except BaseException:
        process.send_signal(signal.SIGINT)
        process.wait()
        raise
    if status := process.wait():
        raise UserError(f"{shlex.join(words[1:])} ended with {status}: {last}")
