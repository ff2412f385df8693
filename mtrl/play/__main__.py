"""python -m mtrl.play: interactive episodes, in which you are the policy.

    python -m mtrl.play                                       plays the default experiment
    python -m mtrl.play +experiment=text_to_sql               plays another one; overrides as for mtrl.main
    python -m mtrl.play row=3 split=test                      starts at a row, by its id or its number
    python -m mtrl.play player=gold episodes=5                shows the perfect player (or player=demonstrator)
    python -m mtrl.play out=FILE.jsonl                        saves the episodes; python -m mtrl.rescore reads them

A line is a response. For a response of several lines, write three quotes alone on a line before and after it. /help
lists the commands. Responses may also come from a pipe; the session then ends with the pipe.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from omegaconf import OmegaConf

from mtrl.command.checks import check
from mtrl.command.compose import merge
from mtrl.command.program import run_program
from mtrl.config.messages import unknown_choice
from mtrl.config.outputs import check_file
from mtrl.config.overrides import normalise
from mtrl.config.schema import Config
from mtrl.environments.agent import ProgramTask
from mtrl.environments.factory import load_task
from mtrl.errors import UserError
from mtrl.play.keyboard import Keyboard
from mtrl.play.players import check_player
from mtrl.play.screen import Screen
from mtrl.play.session import Choices, Session

OWN = ("row", "split", "player", "episodes", "out")
"""Keys of this command, which are not part of the configuration."""


def main(argv: Sequence[str] | None = None) -> int:
    """Compose the configuration, and run the session. Return the exit status."""
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
            f"environment.name={task.family.name} needs an agent program, and cannot be run by hand; a run, "
            "python -m mtrl.preflight and python -m mtrl.evaluate start it"
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
    """Return this command's own keys with their values, and the overrides."""
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
    """Parse the values of this command's own keys.

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


def cli(argv: Sequence[str] | None = None) -> None:
    run_program(main, argv)


if __name__ == "__main__":
    cli()
