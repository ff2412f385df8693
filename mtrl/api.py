"""Runs and evaluations from Python, a notebook for one: what the command line does, as two objects.

    from mtrl.api import MultiTurnRLEvaluator, MultiTurnRLTrainer

    trainer = MultiTurnRLTrainer(recipe="gsm8k", overrides={"trainer.max_steps": 20})
    trainer.train()["success_greedy_after"]
    MultiTurnRLEvaluator(model=trainer).evaluate(evaluate_base_model=True)

Names are those of SageMaker AI's SDK where it has the same thing. Each starts the command that `command` holds as a
process of its own: a notebook has an event loop already, and a GPU is free again afterwards.
"""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from mtrl.config.overrides import quoted
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
        recipe: an experiment of `conf/experiment/`.
        model: a Hugging Face folder or Hub name; None is the recipe's.
        agent_env: `package.module.Class` of an environment or task family; None is the recipe's.
        agent: a program that plays instead: `package.module.function`, or the URL of a service.
        training_dataset: file, folder or Hub name with the rows.
        overrides: any other keys; they come last.
        run_dir: folder of the run; None makes one in `outputs/`.
    """

    def __init__(
        self,
        recipe: str = "gsm8k",
        *,
        model: str | None = None,
        agent_env: str | None = None,
        agent: str | None = None,
        training_dataset: str | None = None,
        overrides: Overrides | None = None,
        run_dir: str | Path | None = None,
    ):
        name = (overrides or {}).get("name", recipe)
        folder = f"outputs/{name}/{datetime.now():%Y-%m-%d_%H-%M-%S}" if run_dir is None else str(run_dir)
        self.run = RunDir(Path(claim(folder) if run_dir is None else folder))
        played_by = {"url" if "://" in agent else "target": agent} if agent else {}
        keys = {
            "experiment": recipe,
            "model.path": model,
            "environment.target": agent_env,
            **{f"generator.agent.{key}": value for key, value in played_by.items()},
            "data.path": training_dataset,
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


class MultiTurnRLEvaluator:
    """One evaluation on held-out rows.

    Args:
        model: a trainer, the folder of a run, a checkpoint, a model folder or a Hub name.
        recipe: the experiment to play, where the model is not a run's and brings none.
        dataset: file, folder or Hub name with the rows; None is the recipe's.
        overrides: any other keys.
        output: folder of the report; None makes one in `outputs/evaluations/`.
    """

    def __init__(
        self,
        model: MultiTurnRLTrainer | str | Path,
        *,
        recipe: str | None = None,
        dataset: str | None = None,
        overrides: Overrides | None = None,
        output: str | Path | None = None,
    ):
        self.model = str(model.run.path) if isinstance(model, MultiTurnRLTrainer) else str(model)
        folder = f"outputs/evaluations/{datetime.now():%Y-%m-%d_%H-%M-%S}" if output is None else str(output)
        self.output = Path(claim(folder) if output is None else folder)
        keys = {"data.path": dataset, **(overrides or {}), "evaluation.output": str(self.output)}
        if recipe is not None:
            keys = {"experiment": recipe, "evaluation.model": self.model, **keys}
        self.command = command("mtrl.evaluate", keys)
        if recipe is None:
            self.command.append(self.model)

    def evaluate(self, evaluate_base_model: bool = False, show: Callable[[str], object] = print) -> dict[str, Any]:
        """Play, score, and write the report; what report.json holds.

        Args:
            evaluate_base_model: compare with the policy before training, on the same rows.
            show: is given every line that the evaluation writes.

        Raises:
            UserError: it ended with an error, and its last words.
        """
        compared = [override("evaluation.compare", ["base"])] if evaluate_base_model else []
        run_command([*self.command, *compared], show)
        return json.loads((self.output / "report.json").read_text(encoding="utf-8"))


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
