"""The command `mtrl`: one subcommand for each program, `mtrl train seed=1` for `python -m mtrl.main seed=1`."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from difflib import get_close_matches

import mtrl
from mtrl.cli import completion
from mtrl.cli.commands import COMMANDS, COMPLETE, GROUPS, SERVERS
from mtrl.errors import UserError
from mtrl.utils.quiet_pipe import quiet_pipe


def main(argv: Sequence[str] | None = None) -> None:
    """Run a subcommand as `python -m` runs its module; exit with 2 and one sentence if there is no such command."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        text = answer(words)
        if text is None:
            module, rest = find(words)
    except UserError as error:
        from mtrl.command.program import refuse  # imports Hydra, which no other line here needs

        refuse(str(error))
    if text is not None:
        with quiet_pipe():
            print(text)
        return
    sys.argv = [f"mtrl {words[0]}", *rest]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def answer(words: Sequence[str]) -> str | None:
    """Return the text that a command line asks for: help, version or completion; None for a subcommand.

    Raises:
        UserError: the completion of an unknown shell is asked for.
    """
    first, rest = (words[0], words[1:]) if words else ("--help", [])
    if first in ("-h", "--help", "help"):
        return help_text()
    if first == "--version":
        return f"mtrl {mtrl.__version__}"
    if first == "serve" and rest[:1] in (["-h"], ["--help"]):
        return "\n".join(["mtrl serve SERVER", "", *(f"  mtrl serve {name} --help" for name in SERVERS)])
    if first in ("completion", COMPLETE):
        return completion.script(rest) if first == "completion" else "\n".join(completion.completions(*rest[:1]))
    return None


def find(words: Sequence[str]) -> tuple[str, list[str]]:
    """Return the module of a command line and the arguments that are left for it.

    Raises:
        UserError: there is no such command.
    """
    name, *rest = words
    if name in COMMANDS:
        module = COMMANDS[name].module
        if isinstance(module, str):
            return module, rest
        if not rest or rest[0] not in module:
            raise UserError(
                f"mtrl {' '.join([name, *rest[:1]])} names no server; write mtrl {name} with one of {', '.join(module)}"
            )
        return module[rest[0]], rest[1:]
    if "=" in name or name.startswith("-"):
        raise UserError(f"mtrl {name} names no command; to train with it write mtrl train {' '.join(words)}")
    near = get_close_matches(name, COMMANDS, n=1)
    raise UserError(
        f"mtrl {name} is no command; " + (f"did you mean mtrl {near[0]}?" if near else "mtrl --help lists them")
    )


def help_text() -> str:
    """Return the help: the commands, grouped by when they are needed, on one screen."""
    lines = ["mtrl COMMAND [key=value …]", "reinforcement learning for language-model agents that act over many turns"]
    for group, commands in GROUPS.items():
        lines += ["", group]
        lines += [f"  {name:<12} {command.summary}" for name, command in commands.items()]
    lines += [
        "",
        "  mtrl COMMAND --help        the options and keys of a command",
        "  mtrl completion SHELL      complete commands, keys and values in bash or zsh",
        "",
        "begin with: mtrl train, then mtrl view outputs",
    ]
    return "\n".join(lines)
