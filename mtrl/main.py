"""python -m mtrl.main: train.

python -m mtrl.main                                      run the default experiment
python -m mtrl.main experiment=text_to_sql seed=1        run another experiment, with one key changed
python -m mtrl.main -m seed=0,1,2                        run a sweep; sweep=NAME for a sweep of conf/sweep/
torchrun --nproc-per-node 4 -m mtrl.main                 one run on four GPUs
python -m mtrl.main --help                               all options
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from signal import SIGINT
from typing import TYPE_CHECKING, Any

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser

from mtrl.command.checks import check
from mtrl.command.compose import CONF, VERSION_BASE, merge
from mtrl.command.engine_checks import check_sampling
from mtrl.command.help import help_text
from mtrl.command.runs import claim, has_default_run_dir, is_marked, mark, settle
from mtrl.config.config_dir import check_folders, check_primary, own_folders
from mtrl.config.messages import one_sentence, refuse
from mtrl.config.overrides import dashed, normalise, quoted
from mtrl.errors import EndedAtOnce, UserError, missing_extra
from mtrl.sweep.choices import names_sweep, typed_out
from mtrl.sweep.job import job
from mtrl.utils.process import is_follower, is_launched

if TYPE_CHECKING:
    pass

CHECKED_JOBS = 32
"""Maximum number of jobs of a sweep that are checked before the first one starts; each other job is checked when it
starts."""


def cli(argv: Sequence[str] | None = None) -> None:
    """Parse the arguments, check every job, then start Hydra."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises the error; mtrl prints the message
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # for environment.target=my_package.MyEnv
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
    """Run the command: train, sweep, or print help or the configuration."""
    try:
        sys.argv[1:] = prepare(argv)
    except NotImplementedError as error:  # raised by a check; later ones are bugs and keep their traceback
        refuse(f"NotImplementedError: {error}")
    start = hydra.main(version_base=VERSION_BASE, config_path=str(CONF), config_name="config")(job)
    args = _parse(sys.argv[1:])
    if args.help:
        print(help_text(args.overrides, args.config_dir, args.resolve))
    elif args.multirun and _runs(args):
        from mtrl.sweep.run import run_sweep

        run_sweep(start, run_dir_of(args.overrides), argv)
    else:
        start()


def follow(argv: Sequence[str]) -> None:
    """Under torchrun, execute the calls of the first rank, which composes and shows the configuration and owns the
    folder of the run."""
    if not _runs(_parse(argv)):
        return
    from mtrl.trainer.run import follow as serve

    serve()


def prepare(argv: Sequence[str]) -> list[str]:
    """Return the arguments for Hydra, with overrides normalised and `run_dir` set, after every job has been checked.

    Raises:
        UserError: an argument or the configuration is wrong; it is raised before any work, and before any folder is
            created.
    """
    args = _parse(argv)
    if args.shell_completion:
        return list(argv)
    check_primary(args.config_name, args.config_path)
    check_folders(own_folders(args.overrides, args.config_dir))
    flags = [word for word in argv if word not in args.overrides]
    overrides = normalise(args.overrides, args.config_dir)
    if names_sweep(overrides) and _runs(args) and not args.multirun:
        args.multirun = True
        flags.append("--multirun")
    if args.multirun and is_launched():
        raise UserError("-m starts many runs, and torchrun's ranks share one; start torchrun once per run")
    if _runs(args) and not args.experimental_rerun:
        if args.multirun:
            overrides = typed_out(overrides, args.config_dir)
        run_dir = check_jobs(overrides, args)
        overrides = [*(o for o in overrides if not o.startswith("run_dir=")), quoted("run_dir", run_dir)]
    return [*flags, *overrides]


def _parse(argv: Sequence[str]) -> Any:
    """Parse Hydra's flags; overrides may stand between them."""
    parser = get_args_parser()

    def on_error(message: str) -> None:
        unknown = message.removeprefix("unrecognized arguments: ").split()[0]
        raise dashed(unknown) if unknown.startswith("--") else UserError(f"{message}; python -m mtrl.main --help")

    parser.error = on_error  # type: ignore[assignment, method-assign]
    return parser.parse_intermixed_args(argv)


def _runs(args: Any) -> bool:
    """Return whether the command starts a run; otherwise it prints help or the configuration."""
    return not (args.help or args.hydra_help or args.shell_completion or args.cfg or args.info)


def check_jobs(overrides: list[str], args: Any) -> str:
    """Compose and check every job of the command; return the folder of the run or sweep."""
    jobs = _jobs(overrides) if args.multirun else [overrides]
    configs = [merge(words, args.config_dir) for words in jobs]
    first, is_named = configs[0], not has_default_run_dir(configs[0])
    if args.multirun and first.resume == "latest" and not is_named:
        raise UserError("resume=latest does not say which sweep goes on; add run_dir=FOLDER of the sweep")
    sweep_dir = str(first.run_dir)
    for number, cfg in enumerate(configs):
        if args.multirun:
            cfg.run_dir = os.path.join(sweep_dir, str(number))
        settle(cfg)
        check(cfg)
        check_sampling(cfg)
        if cfg.model.lora_rank and find_spec("peft") is None:  # checked here, so that it fails before the model loads
            raise missing_extra("peft", "lora")
    run_dir = sweep_dir if args.multirun else first.run_dir
    if not (is_named or first.resume != "none" or is_marked(Path(run_dir))):
        run_dir = claim(run_dir)
    mark(run_dir)
    return run_dir


def run_dir_of(overrides: Sequence[str]) -> str:
    """Return the folder that `prepare` has added to the overrides."""
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    return next(str(override.value()) for override in reversed(parsed) if override.key_or_group == "run_dir")


def _jobs(overrides: list[str]) -> list[list[str]]:
    """Return the overrides of each job of a sweep, at most `CHECKED_JOBS`. Keys with ranges that only a sweeper can
    sample from keep their defaults."""
    choices = []
    for override in OverridesParser.create().parse_overrides(overrides):
        line = override.input_line or ""
        if not override.is_sweep_override():
            choices.append([line])
        elif override.is_discrete_sweep() and "glob(" not in line:
            choices.append([f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()])
    return [list(words) for words in itertools.islice(itertools.product(*choices), CHECKED_JOBS)]


if __name__ == "__main__":
    cli()
