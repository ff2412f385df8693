"""mtrl train: train.

mtrl train                                  run the default experiment
mtrl train experiment=text_to_sql seed=1    run another experiment, with one key changed
mtrl train -m seed=0,1,2                    run a sweep; sweep=NAME for a sweep of conf/sweep/
torchrun --nproc-per-node 4 -m mtrl.main    one run on four GPUs
mtrl train --help                           all options
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from signal import SIGINT

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import configure_log
from omegaconf import DictConfig

from mtrl.command.checks import ready
from mtrl.command.compose import CONF, VERSION_BASE, merge_with_hydra, naming_params, without_hydra
from mtrl.command.help import help_text
from mtrl.command.program import one_sentence, refuse, start_program
from mtrl.command.runs import has_default_run_dir, reserve
from mtrl.config.config_dir import check_folders, check_primary, own_folders
from mtrl.config.overrides import dashed, normalise, quoted
from mtrl.errors import EndedAtOnce, UserError
from mtrl.sweep.job import job
from mtrl.sweep.run import check_jobs, names_sweep, run_sweep, typed_out
from mtrl.training import run, warn
from mtrl.utils.process import is_follower, is_launched

READ_IN_A_RUN = ("hydra.searchpath", "hydra.verbose", "hydra.job_logging", "hydra/job_logging")
"""Hydra's own keys that have an effect on a single run."""


def cli(argv: Sequence[str] | None = None) -> None:
    """Run the command: train, sweep, or print help or the configuration."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises the error; mtrl prints the message
    start_program()
    words = sys.argv[1:] if argv is None else argv
    with one_sentence():
        try:
            if is_follower():
                follow(words)
            else:
                lead(words)
        except KeyboardInterrupt as end:
            if not is_follower():
                print(str(end) or "SIGINT: mtrl.main ended before it had a run to save", file=sys.stderr)
            raise SystemExit(128 + (end.number if isinstance(end, EndedAtOnce) else SIGINT)) from None


def lead(argv: Sequence[str]) -> None:
    """Check the command, then execute it."""
    try:
        execute = prepare(argv)
    except NotImplementedError as error:  # raised by a check; later ones are bugs and keep their traceback
        refuse(f"NotImplementedError: {error}")
    execute()


def follow(argv: Sequence[str]) -> None:
    """Under torchrun, execute the calls of the first rank, which composes and shows the configuration and owns the
    folder of the run."""
    if not _starts_run(_parse(argv)):
        return
    from mtrl.trainer.run import follow as serve

    serve()


def prepare(argv: Sequence[str]) -> Callable[[], object]:
    """Check a command, and return the function that executes it.

    Raises:
        UserError: an argument or the configuration is wrong; it is raised before any work, and before any folder is
            created.
    """
    args = _parse(argv)
    if args.shell_completion:
        return partial(_call_hydra, argv)
    check_primary(args.config_name, args.config_path)
    check_folders(own_folders(args.overrides, args.config_dir))
    flags = [word for word in argv if word not in args.overrides]
    overrides = normalise(args.overrides, args.config_dir)
    if args.help:
        return lambda: print(help_text(overrides, args.config_dir, args.resolve))
    _check_modes(args)
    if not _starts_run(args):
        return partial(_show, [*flags, *overrides])
    if args.multirun or names_sweep(overrides):
        flags += [] if args.multirun else ["--multirun"]
        return _prepare_sweep(argv, flags, overrides, args.config_dir)
    return _prepare_run(overrides, args.config_dir)


def _prepare_run(overrides: list[str], config_dir: str | None) -> Callable[[], object]:
    """Compose and check the configuration of a single run, and choose its folder. Return the function that trains."""
    composed = merge_with_hydra(overrides, config_dir)
    cfg, is_named = without_hydra(composed), not has_default_run_dir(composed)
    warn(ready(cfg, overrides))
    warn(
        f"{word} has no effect on a single run; a sweep (-m) reads it"
        for word in composed.hydra.overrides.hydra
        if not word.startswith(READ_IN_A_RUN)
    )
    cfg.run_dir = reserve(cfg.run_dir, is_named or cfg.resume != "none")
    return partial(_train, cfg, composed)


def _train(cfg: DictConfig, composed: DictConfig) -> None:
    """Train in the state that Hydra gives to a job of a sweep: the folder exists, logging is configured, and
    `HydraConfig` has the overrides and the config groups of the command."""
    with suppress(OSError):  # `RunDir.create` reports a folder that cannot be created
        Path(cfg.run_dir).mkdir(parents=True, exist_ok=True)
    composed.hydra.runtime.output_dir = str(Path(cfg.run_dir).absolute())
    before = HydraConfig.instance().cfg
    HydraConfig.instance().set_config(composed)
    try:
        configure_log(composed.hydra.job_logging, composed.hydra.verbose)
        run(cfg)
    finally:
        HydraConfig.instance().cfg = before


def _prepare_sweep(
    argv: Sequence[str], flags: list[str], overrides: list[str], config_dir: str | None
) -> Callable[[], object]:
    """Check the jobs of a sweep, and create its folder. Return the function that runs the sweep."""
    if is_launched():
        raise UserError("-m starts many runs, and torchrun's ranks share one; start torchrun once per run")
    overrides = typed_out(overrides, config_dir)
    sweep_dir = check_jobs(overrides, config_dir)
    overrides = [*(word for word in overrides if not word.startswith("run_dir=")), quoted("run_dir", sweep_dir)]
    return partial(run_sweep, partial(_call_hydra, [*flags, *overrides]), sweep_dir, argv)


def _show(words: Sequence[str]) -> None:
    """Let Hydra print the configuration, or what another flag asks for."""
    with naming_params(words):
        _call_hydra(words)


def _call_hydra(words: Sequence[str]) -> None:
    """Let Hydra execute these words: start the jobs of a sweep, or print what a flag asks for."""
    sys.argv[1:] = words
    hydra.main(version_base=VERSION_BASE, config_path=str(CONF), config_name="config")(job)()


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse Hydra's flags, which `--hydra-help` explains; overrides may stand between them."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("overrides", nargs="*")
    for names in (
        *(["--help", "-h"], ["--hydra-help"], ["--resolve"], ["--run", "-r"], ["--multirun", "-m"]),
        ["--shell-completion", "-sc"],
    ):
        parser.add_argument(*names, action="store_true")
    for names in ["--package", "-p"], ["--config-path", "-cp"], ["--config-name", "-cn"], ["--config-dir", "-cd"]:
        parser.add_argument(*names)
    parser.add_argument("--cfg", "-c", choices=["job", "hydra", "all"])
    parser.add_argument("--info", "-i", nargs="?", const="all")
    parser.add_argument("--version", action="version", version=f"Hydra {hydra.__version__}")

    def on_error(message: str) -> None:
        unknown = message.removeprefix("unrecognized arguments: ").split()[0]
        raise dashed(unknown) if unknown.startswith("--") else UserError(f"{message}; mtrl train --help")

    parser.error = on_error  # type: ignore[assignment, method-assign]
    return parser.parse_intermixed_args(argv)


def _check_modes(args: argparse.Namespace) -> None:
    """Raise a UserError for two flags of which Hydra takes only one."""
    given = [f"--{name}" for name in ("run", "multirun", "cfg", "info") if getattr(args, name)]
    if len(given) > 1:
        raise UserError(f"{given[0]} and {given[1]} exclude each other; leave one of them out")


def _starts_run(args: argparse.Namespace) -> bool:
    """Return whether the command starts a run; otherwise it prints help or the configuration."""
    return not (args.help or args.hydra_help or args.shell_completion or args.cfg or args.info)


if __name__ == "__main__":
    cli()
