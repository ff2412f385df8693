"""mtrl play: interactive episodes, in which you are the policy.

    mtrl play                                       plays the default experiment
    mtrl play +experiment=text_to_sql               plays another one; overrides as for mtrl train
    mtrl play row=3 split=test                      starts at a row, by its id or its number
    mtrl play player=gold episodes=5                shows the perfect player (or player=demonstrator)
    mtrl play out=FILE.jsonl                        saves the episodes; mtrl rescore reads them

A line is a response. For a response of several lines, write three quotes alone on a line before and after it. /help
lists the commands. Responses may also come from a pipe; the session then ends with the pipe.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from mtrl.command.program import run_program
from mtrl.play.choices import choices_of, parse, prepared, split_words
from mtrl.play.keyboard import Keyboard
from mtrl.play.players import check_player
from mtrl.play.screen import Screen
from mtrl.play.session import PlaySession


def main(argv: Sequence[str] | None = None) -> int:
    """Compose the configuration, and run the session. Return the exit status."""
    args = parse("mtrl play", __doc__, argv)
    own, overrides = split_words(args.overrides)
    choices = choices_of(own)
    config, task = prepared(overrides, args.config_dir)
    check_player(choices.player, task.family)
    screen = Screen()
    keyboard = Keyboard(sys.stdin, screen.note)
    if keyboard.is_terminal and choices.player == "me":
        screen.note("a line is a response; /help lists the commands, Ctrl-D ends")
    session = PlaySession(config, task, choices, keyboard, screen)
    try:
        session.run()
    except KeyboardInterrupt:
        return 130
    return 0


def cli(argv: Sequence[str] | None = None) -> None:
    run_program(main, argv)


if __name__ == "__main__":
    cli()
