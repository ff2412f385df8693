"""What is played, on which rows and by which player: the arguments of the programs of this package."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from omegaconf import OmegaConf

from mtrl.command.checks import check
from mtrl.command.compose import merge
from mtrl.config.messages import unknown_choice
from mtrl.config.outputs import check_file
from mtrl.config.overrides import normalise
from mtrl.config.schema import Config
from mtrl.environments.agent import ProgramTask
from mtrl.environments.factory import Task, load_task
from mtrl.errors import UserError
from mtrl.types import Row

OWN = ("row", "split", "player", "episodes", "out")
"""Keys of these settings, which are not part of the configuration."""
LONGEST_NUMBER = 20
"""Number of digits from which a text is no number of a row. Python reads no number of 5,000 digits."""


@dataclass(frozen=True)
class Choices:
    """The settings besides the configuration."""

    split: str = "train"
    row: str | None = None
    player: str = "me"
    episodes: int | None = None
    """Number of episodes; None: until the input or the rows end."""
    out: Path | None = None


def parse(prog: str, description: str | None, argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse a command line into its `overrides`, with the keys of `OWN` among them, and its `config_dir`."""
    parser = argparse.ArgumentParser(
        prog=prog, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as for mtrl train")
    parser.add_argument("--config-dir", help="config groups of your own")
    return parser.parse_intermixed_args(argv)


def split_words(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return the keys of `OWN` with their values, and the overrides."""
    own: dict[str, str] = {}
    overrides: list[str] = []
    for word in words:
        key, is_set, value = word.lstrip("+").partition("=")
        if is_set and key in OWN:
            own[key] = value
        else:
            overrides.append(word)
    return own, overrides


def choices_of(own: dict[str, str]) -> Choices:
    """Parse the values of the keys of `OWN`.

    Raises:
        UserError: a value is invalid.
    """
    player, split = own.get("player", "me"), own.get("split", "train")
    if split not in ("train", "test"):
        raise unknown_choice("split", split, ("train", "test"))
    episodes = own.get("episodes", None if player == "me" else "1")
    if episodes is not None and (not episodes.isdecimal() or int(episodes) < 1):
        raise UserError(f"episodes={episodes} must be an integer of at least 1; write for example episodes=3")
    out = Path(own["out"]) if "out" in own else None
    if out is not None:
        check_file(f"out={out}", out)
    return Choices(split, own.get("row"), player, None if episodes is None else int(episodes), out)


def prepared(overrides: Sequence[str], config_dir: str | None) -> tuple[Config, Task]:
    """Return the configuration and its task; warnings of the configuration go to standard error.

    Raises:
        UserError: the configuration is invalid, or the task needs an agent program.
    """
    cfg = merge(normalise(overrides, config_dir), config_dir)
    for warning in check(cfg):
        print(f"warning: {warning}", file=sys.stderr)
    config: Config = OmegaConf.to_object(cfg)  # type: ignore[assignment]
    task = load_task(config)
    if task.family.environment is ProgramTask:
        raise UserError(
            f"environment.name={task.family.name} needs an agent program, and cannot be run by hand; a run, "
            "mtrl preflight and mtrl evaluate start it"
        )
    return config, task


def rows_of(task: Task, split: str) -> list[Row]:
    """Return the rows of a split.

    Raises:
        UserError: the split has no rows.
    """
    rows: list[Row] = getattr(task.splits, split)
    if not rows:
        raise UserError(f"split={split} has no rows; check data.path and its splits, or take another split")
    return rows


def find_row(rows: list[Row], wanted: str, split: str) -> int:
    """Return the index of the row with this id, or else of the row with this number.

    Raises:
        UserError: no such row exists.
    """
    for place, row in enumerate(rows):
        if str(row["id"]) == wanted:
            return place
    if wanted.isdecimal() and len(wanted) < LONGEST_NUMBER and int(wanted) < len(rows):
        return int(wanted)
    some = f", ids such as {', '.join(str(row['id']) for row in rows[:3])}"
    raise UserError(f"row={wanted:.80} is no row of split={split}; it has {len(rows)} rows, 0 to {len(rows) - 1}{some}")
