"""python -m mtrl.play: be the policy at the keyboard.

    python -m mtrl.play                                       the default experiment
    python -m mtrl.play +experiment=text_to_sql               another one; overrides as for mtrl.main
    python -m mtrl.play row=3 split=test                      a row, by its id or its number
    python -m mtrl.play player=gold episodes=5                let the perfect player play (or player=demonstrator)
    python -m mtrl.play out=FILE.jsonl                        keep the episodes; python -m mtrl.rescore reads them

A line is a response; for several lines, write three quotes alone on a line before and after them. /help lists the
commands. Responses may also come from a pipe, and then end with it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from omegaconf import OmegaConf

from mtrl.config.checks import check
from mtrl.config.compose import merge
from mtrl.config.messages import unknown_choice
from mtrl.config.outputs import check_file
from mtrl.config.overrides import normalise
from mtrl.config.program import run_program
from mtrl.config.schema import Config
from mtrl.environments.agent import ProgramTask
from mtrl.environments.factory import load_task
from mtrl.errors import UserError
from mtrl.play.keyboard import Keyboard
from mtrl.play.players import check_player
from mtrl.play.screen import Screen
from mtrl.play.session import Choices, Session

OWN = ("row", "split", "player", "episodes", "out")
"""Keys that are not the configuration's."""


def main(argv: Sequence[str] | None = None) -> int:
    """Compose, and play. Returns the exit status."""
    args = parse(argv)
    own, overrides = split_words(args.overrides)
    choices = choices_of(own)
    cfg = merge(normalise(overrides, args.config_dir), args.config_dir)
    for warning in check(cfg):
        print(f"warning: {warning}", file=sys.stderr)
    config: Config = OmegaConf.to_object(cfg)  # type: ignore[assignment]
    task = load_task(config)
    if task.family.environment is ProgramTask:
        raise UserError(
            f"environment.name={task.family.name} is played by a program, and nobody else can; a run plays it, and "
            "so do python -m mtrl.preflight and python -m mtrl.evaluate"
        )
    check_player(choices.player, task.family)
    screen = Screen()
    keyboard = Keyboard(sys.stdin, screen.note)
    if keyboard.is_terminal and choices.player == "me":
        screen.note("a line is a response; /help lists the commands, Ctrl-D ends")
    session = Session(config, task, choices, keyboard, screen)
    try:
        session.run()
    except KeyboardInterrupt:
        return 130
    return 0


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m mtrl.play", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as for python -m mtrl.main")
    parser.add_argument("--config-dir", help="config groups of your own")
    return parser.parse_intermixed_args(argv)


def split_words(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Our own keys with their values, and the overrides."""
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
    """
    Raises:
        UserError: a value that does not fit.
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


def cli(argv: Sequence[str] | None = None) -> None:
    run_program(main, argv)


if __name__ == "__main__":
    cli()
