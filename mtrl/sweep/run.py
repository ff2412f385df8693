"""A sweep from its command to its report: the values to try, the check of its jobs, and their execution."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser

from mtrl.command.checks import ready
from mtrl.command.compose import merge, merge_with_hydra
from mtrl.command.runs import check_named, has_default_run_dir, reserve
from mtrl.config.overrides import normalise
from mtrl.errors import UserError, missing_extra
from mtrl.sweep.pruning import check_objective
from mtrl.sweep.study import TARGET

CHECKED_JOBS = 32
"""Maximum number of jobs of a sweep that are checked before the first one starts; each job is checked when it
starts."""


def names_sweep(overrides: Sequence[str]) -> bool:
    """Return whether these (normalised) overrides select a file of conf/sweep/."""
    return any(word.startswith("sweep=") for word in overrides)


def typed_out(overrides: Sequence[str], config_dir: str | None) -> list[str]:
    """Return the overrides of a sweep, including those of `hydra.sweeper.params`. A typed key has priority.

    Raises:
        UserError: the sweep needs a package that is not installed, or prunes by an objective that is not measured.
    """
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    plain = [override.input_line or "" for override in parsed if not override.is_sweep_override()]
    cfg = merge_with_hydra(plain, config_dir)
    sweeper = cfg.hydra.sweeper
    if sweeper._target_ == TARGET:
        if find_spec("optuna") is None:
            raise missing_extra("optuna", "sweep")
        if sweeper.pruner is not None:
            check_objective(cfg.objective)
    params = sweeper.get("params")
    if not params:
        return list(overrides)
    typed = {override.key_or_group for override in parsed}
    added = normalise([f"{key}={value}" for key, value in params.items() if key not in typed], config_dir)
    return [*added, *overrides, "hydra.sweeper.params=null"]


def check_jobs(overrides: Sequence[str], config_dir: str | None) -> str:
    """Compose and check the first jobs of a sweep, so that no job starts if one of them cannot run. Return the folder
    of the sweep, which is created if the command does not name it.

    Raises:
        UserError: a job cannot run, `run_dir` is empty, or the sweep to resume is not named.
    """
    configs = [merge(words, config_dir) for words in job_overrides(overrides)]
    sweep_dir, is_named = str(configs[0].run_dir), not has_default_run_dir(configs[0])
    check_named(sweep_dir)
    if configs[0].resume == "latest" and not is_named:
        raise UserError("resume=latest does not say which sweep goes on; add run_dir=FOLDER of the sweep")
    for number, cfg in enumerate(configs):
        cfg.run_dir = os.path.join(sweep_dir, str(number))
        ready(cfg)
    return reserve(sweep_dir, is_named or configs[0].resume != "none")


def job_overrides(overrides: Sequence[str]) -> list[list[str]]:
    """Return the overrides of each job of a sweep, at most `CHECKED_JOBS`. Keys with ranges that only a sweeper can
    sample from have their defaults."""
    choices = []
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        line = override.input_line or ""
        if not override.is_sweep_override():
            choices.append([line])
        elif override.is_discrete_sweep() and "glob(" not in line:
            choices.append([f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()])
    return [list(words) for words in itertools.islice(itertools.product(*choices), CHECKED_JOBS)]


def run_sweep(start: Callable[[], object], folder: str, words: Sequence[str]) -> None:
    """Let Hydra run the jobs (`start`), then print the report, even if the sweep was stopped.

    Args:
        words: the words of the command, which the command that resumes the sweep repeats.

    Raises:
        Interrupted: a signal came; the jobs in progress have saved their state.
        SystemExit: with status 1 if a job has failed; all other jobs have run.
    """
    from mtrl.sweep.sweep_runs import read_sweep
    from mtrl.sweep.table import resume_command, show
    from mtrl.sweep.workers import stopping

    try:
        with stopping():
            start()
    except BaseException:
        with suppress(UserError):  # the sweep ended before its first job
            show(read_sweep(Path(folder)))
            print(f"the sweep stopped; go on with: {resume_command(words, folder)}", file=sys.stderr)
        raise
    sweep = read_sweep(Path(folder))
    show(sweep)
    if len(sweep.with_status("finished")) + len(sweep.with_status("pruned")) < len(sweep.jobs):
        raise SystemExit(1)
