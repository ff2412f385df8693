"""python -m mtrl.evaluate: any model on a fixed held-out split, played, paid and scored as in training.

    python -m mtrl.evaluate RUN                                the end of a run, by the run's own configuration
    python -m mtrl.evaluate RUN evaluation.compare=[base]      and the policy before training, on the same rows
    python -m mtrl.evaluate RUN/checkpoints/best               other weights of it: best, latest, step_000040
    python -m mtrl.evaluate experiment=text_to_sql evaluation.model=FOLDER      a model folder, or a Hub name
    python -m mtrl.evaluate experiment=gsm8k evaluation.model=NAME@http://HOST:PORT/v1      behind an endpoint
    python -m mtrl.evaluate RUN evaluation.sampled_rows=100 evaluation.samples_per_row=8 evaluation.pass_k_values=[1,8]

Settings, all of `evaluation` in mtrl/config/schema.py:

    model            RUN means its export/, or while it goes on its newest checkpoint; base: the policy before training
    compare          further models, each compared with the first on the same rows and random streams
    split            test, validation (data.validation_rows) or train
    rows             rows that are played greedily; sampled_rows and samples_per_row: those that are sampled
    output           folder of the report; one that is there is gone on with: only what is missing is played
    endpoint.*       key (by the name of its environment variable), time-out, repetitions, requests at once,
                     price (USD per million tokens) and budget (USD, requests or tokens)

How turns are sampled: generator.eval_sampling_params; null is as in training. Of SageMaker's evaluator, `model` is
evaluation.model, `dataset` data.path and data.test_split, the agent's configuration environment.* and generator.*, and
`s3_output_path` evaluation.output. It ends with 0; with 1 if more episodes failed than environment.max_failed_share or
a budget is spent; with 2 if the command is wrong.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from mtrl.config.program import run_program
from mtrl.config.runs import claim
from mtrl.config.schema import Config
from mtrl.environments.factory import Task, load_task
from mtrl.errors import UserError
from mtrl.evaluate.identity import begin
from mtrl.evaluate.settings import Words, check_players, check_servers, configuration, rows_of, without_effect
from mtrl.evaluate.sources import MODELS, sources_of
from mtrl.evaluate.store import LOCK, Lock
from mtrl.evaluation.rollouts import Source
from mtrl.generator.engines.purse import BudgetSpentError
from mtrl.tracking.console import Console
from mtrl.tracking.run_dir import RunDir
from mtrl.tracking.run_log import RunLog
from mtrl.tracking.text import from_here
from mtrl.types import Row

BEFORE_ANYTHING = {LOCK, "run.log", f".{MODELS}.part"}
"""What an evaluation that was killed at its very beginning leaves."""


def main(argv: Sequence[str] | None = None) -> int:
    """Compose, play, report. Returns the exit status."""
    args = parse(argv)
    words = Words.of(args.words)
    cfg, warnings = configuration(words, args.config_dir)
    config: Config = OmegaConf.to_object(cfg)  # type: ignore[assignment]
    sources = sources_of([str(config.evaluation.model), *config.evaluation.compare])
    check_servers(config, sources)
    check_players(config, sources)
    task = load_task(config)
    rows, told = rows_of(config, task.splits)
    warnings += [*told, *without_effect(config, sources, words.overrides)]
    folder = output_of(config).absolute()  # an environment may change the working directory
    with Lock(folder), RunLog(RunDir(folder).log) as log:
        console = Console(mirror=log.line)
        log.show_warnings(console.show_warning)
        for warning in warnings:
            console.warning(warning)
        return evaluate(cfg, task, rows, sources, folder, console)


def evaluate(
    cfg: DictConfig, task: Task, rows: list[Row], sources: list[Source], folder: Path, console: Console
) -> int:
    """Everything after the checks."""
    from mtrl.evaluate.evaluation import Evaluation
    from mtrl.evaluate.play import TooManyFailedError

    config: Config = OmegaConf.to_object(cfg)  # type: ignore[assignment]
    config.async_config.max_steps_off_policy = 0  # nothing learns meanwhile, so turns can wait for each other
    again = f"go on with: the same command and evaluation.output={from_here(folder)}"
    try:
        sources = [located(source, config, task, console) for source in sources]
        if begin(folder, cfg, sources):
            console.note(f"going on with {folder}")
        Evaluation(config, task, rows, sources, folder, console).run()
    except (TooManyFailedError, BudgetSpentError) as error:
        console.warning(f"{error}; {again}")
        return 1
    except KeyboardInterrupt:
        console.note(again)
        return 130
    except UserError:
        raise
    except Exception:
        logging.getLogger("mtrl").info("the evaluation stopped", exc_info=True)
        raise
    return 0


def located(source: Source, config: Config, task: Task, console: Console) -> Source:
    """With the folder of the policy before training; the tiny one is made if it is not there yet."""
    if source.kind != "base":
        return source
    if config.model.name == "tiny" and not task.splits.train:
        raise UserError(
            "evaluation.model=base: there are no training rows to warm the tiny policy up on; see data.path"
        )
    from mtrl.trainer.setup import preparation, start_of

    with console.progress(*preparation(config)) as bar:
        return replace(source, path=start_of(config, task, lambda step, loss: bar.advance()))


def output_of(config: Config) -> Path:
    """The folder, made.

    Raises:
        UserError: it cannot be, or holds something else than an evaluation.
    """
    named = config.evaluation.output
    if named is None:
        return Path(claim(f"outputs/evaluations/{config.name}/{datetime.now():%Y-%m-%d_%H-%M-%S}"))
    folder = Path(named).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        others = {path.name for path in folder.iterdir()} - BEFORE_ANYTHING
    except OSError as error:
        raise UserError(f"evaluation.output={named} cannot be made ({error.strerror}); name another folder") from error
    if others and MODELS not in others:
        raise UserError(f"evaluation.output={named} holds other things than an evaluation; name a new folder")
    return folder


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m mtrl.evaluate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*", metavar="RUN or key=value", help="a run, and what is otherwise than in it")
    parser.add_argument("--config-dir", help="config groups of your own")
    return parser.parse_intermixed_args(argv)


def cli(argv: Sequence[str] | None = None) -> None:
    run_program(main, argv)


if __name__ == "__main__":
    cli()
