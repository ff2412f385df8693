"""mtrl evaluate: evaluate any model on a fixed held-out split, with the rewards and the scorer of training.

    mtrl evaluate RUN                                the final weights of a run, with the run's configuration
    mtrl evaluate RUN evaluation.compare=[base]      also the policy before training, on the same rows
    mtrl evaluate RUN/checkpoints/best               other weights of the run: best, latest, step_000040
    mtrl evaluate experiment=text_to_sql evaluation.model=FOLDER      a model folder, or a Hub name
    mtrl evaluate experiment=gsm8k evaluation.model=NAME@http://HOST:PORT/v1      behind an endpoint
    mtrl evaluate RUN evaluation.sampled_rows=100 evaluation.samples_per_row=8 evaluation.pass_k_values=[1,8]

Settings of `evaluation`, which mtrl/config/schema.py lists in full:

    model            RUN: its export/, or its newest checkpoint while it is running; base: the policy before training
    compare          further models, each compared with the first on the same rows and random streams
    split            test, validation (data.validation_rows) or train
    rows             number of greedy rows; sampled_rows and samples_per_row: number of sampled rows and their samples
    output           folder of the report; in an existing folder, only the missing episodes are run
    endpoint.*       key (by the name of its environment variable), time-out, retries, concurrent requests,
                     price (USD per million tokens) and budget (USD, requests or tokens)

generator.eval_sampling_params sets the sampling of turns; null means the sampling of training. Equivalents of
SageMaker's evaluator: `model` is evaluation.model, `dataset` is data.path and data.test_split, the agent's
configuration is environment.* and generator.*, and `s3_output_path` is evaluation.output. The exit status is 0; 1 if
more episodes failed than environment.max_failed_share allows or a budget is spent; 2 if the command is wrong.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from mtrl.command.program import run_program
from mtrl.command.runs import claim
from mtrl.config.schema import Config
from mtrl.console.console import Console
from mtrl.engines.endpoints.budget import BudgetSpentError
from mtrl.environments.factory import Task, load_task
from mtrl.errors import UserError
from mtrl.evaluation.identity import begin
from mtrl.evaluation.rollouts import Source
from mtrl.evaluation.settings import (
    Words,
    check_agent_models,
    check_servers,
    chosen_prompt,
    configuration,
    rows_of,
    without_effect,
)
from mtrl.evaluation.sources import MODELS, sources_of
from mtrl.record.run_dir import RunDir
from mtrl.record.run_lock import RunLock
from mtrl.record.run_log import RunLog
from mtrl.types import Row
from mtrl.utils.files import in_home
from mtrl.utils.text import from_here

BEFORE_ANYTHING = {"run.log", f".{MODELS}.part"}
"""Names of the files that may be left by an evaluation that was killed at its start."""


def main(argv: Sequence[str] | None = None) -> int:
    """Compose the configuration, run the evaluation and write the report. Return the exit status."""
    args = parse(argv)
    words = Words.of(args.words)
    cfg, warnings = configuration(words, args.config_dir)
    config: Config = OmegaConf.to_object(cfg)  # type: ignore[assignment]
    sources = sources_of([str(config.evaluation.model), *config.evaluation.compare])
    check_servers(config, sources)
    check_agent_models(config, sources)
    cfg.environment.prompt = config.environment.prompt = chosen_prompt(config, sources)
    cfg.trainer.fsdp.param_dtype = chosen_dtype(config, words, sources)
    task = load_task(config)
    rows, row_warnings = rows_of(config, task.splits)
    warnings += [*row_warnings, *without_effect(config, sources, words.overrides)]
    folder = output_of(config).absolute()  # an environment may change the working directory
    in_use = f"evaluation.output={folder} is being written by another evaluation; wait for it, or name another"
    with RunLock(RunDir(folder), in_use), RunLog(RunDir(folder).log) as log:
        console = Console(mirror=log.line)
        log.show_warnings(console.show_warning)
        for warning in warnings:
            console.warning(warning)
        return evaluate(cfg, task, rows, sources, folder, console)


def evaluate(
    cfg: DictConfig, task: Task, rows: list[Row], sources: list[Source], folder: Path, console: Console
) -> int:
    """Run the evaluation after the checks. Return the exit status."""
    from mtrl.evaluation.evaluation import Evaluation
    from mtrl.evaluation.runner import TooManyFailedError

    config: Config = OmegaConf.to_object(cfg)  # type: ignore[assignment]
    config.async_config.max_steps_off_policy = 0  # no training runs meanwhile, so turns can wait for each other
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


def chosen_dtype(config: Config, words: Words, sources: Sequence[Source]) -> str | None:
    """Return the value of `trainer.fsdp.param_dtype`: that of the run, whose value was resolved by the machine that
    trained it, or the one that a new run of this configuration would have on this machine."""
    if words.run is not None or all(source.kind == "endpoint" for source in sources):
        return config.trainer.fsdp.param_dtype
    from mtrl.trainer.setup.machine import with_machine_settings

    return with_machine_settings(config).trainer.fsdp.param_dtype


def located(source: Source, config: Config, task: Task, console: Console) -> Source:
    """Return the source with the folder of its weights filled in if it is `base`. The tiny policy is created if it does
    not exist yet."""
    if source.kind != "base":
        return source
    if config.model.name == "tiny" and not task.splits.train:
        raise UserError(
            "evaluation.model=base: there are no training rows to warm the tiny policy up on; see data.path"
        )
    from mtrl.trainer.setup.parts import preparation, start_of

    with console.progress(*preparation(config)) as bar:
        return replace(source, path=start_of(config, task, lambda step, loss: bar.advance()))


def output_of(config: Config) -> Path:
    """Create and return the output folder.

    Raises:
        UserError: The folder cannot be created, or holds something other than an evaluation.
    """
    named = config.evaluation.output
    if named is None:
        return Path(claim(f"outputs/evaluations/{config.name}/{datetime.now():%Y-%m-%d_%H-%M-%S}"))
    folder = in_home(named)
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
        prog="mtrl evaluate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*", metavar="RUN or key=value", help="a run, and what is otherwise than in it")
    parser.add_argument("--config-dir", help="config groups of your own")
    return parser.parse_intermixed_args(argv)


def cli(argv: Sequence[str] | None = None) -> None:
    run_program(main, argv)


if __name__ == "__main__":
    cli()
