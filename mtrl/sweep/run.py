"""The execution of a sweep, from its first job to its report."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from mtrl.errors import UserError
from mtrl.sweep.report import read_sweep
from mtrl.sweep.table import again, show
from mtrl.sweep.workers import stopping


def run_sweep(start: Callable[[], object], folder: str, words: Sequence[str]) -> None:
    """Let Hydra run the jobs (`start`), then print the report, even if the sweep was stopped. `words` are those of the
    command.

    Raises:
        Interrupted: a signal came; the jobs in progress have saved their state.
        SystemExit: with status 1 if a job has failed; all other jobs have run.
    """
    try:
        with stopping():
            start()
    except BaseException:
        with suppress(UserError):  # the sweep ended before its first job
            show(read_sweep(Path(folder)))
            print(f"the sweep stopped; go on with: {again(words, folder)}", file=sys.stderr)
        raise
    sweep = read_sweep(Path(folder))
    show(sweep)
    if len(sweep.with_status("finished")) + len(sweep.with_status("pruned")) < len(sweep.jobs):
        raise SystemExit(1)
