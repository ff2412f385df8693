"""The functions that a run calls, given by the layers above the trainer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtrl.config.schema import Config
from mtrl.environments.factory import Task

OnEvaluation = Callable[[int, dict[str, Any]], None]
Show = Callable[[str], None]


def nothing(*_: Any) -> None:
    """Hook that does nothing."""


@dataclass(frozen=True)
class Hooks:
    """Functions that a run calls on its way."""

    at_start: Callable[[Config, Task, Path, Show, Show], None] = nothing
    """Called before the first step of a new run with the configuration, the task, the folder of the run, and the
    functions that show a note and a warning. A `UserError` from it ends the run."""
    plan: Callable[[Config, Show, Show], None] = nothing
    """Called at the start of each run, also of one that is resumed, with the configuration and the functions that show
    a note and a warning."""
    on_evaluation: OnEvaluation = nothing
    """Called with step and metrics after each evaluation; see `Trainer`."""
