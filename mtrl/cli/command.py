"""The command `mtrl`: one subcommand for each program, `mtrl train seed=1` for `python -m mtrl.main seed=1`."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

import mtrl
from mtrl.errors import UserError
from mtrl.utils.quiet_pipe import quiet_pipe


@dataclass(frozen=True)
class Subcommand:
    """One subcommand."""

    module: str | Mapping[str, str]
    """Module that `python -m` runs; or several modules, of which the next word of the command names one."""
    summary: str
    takes_keys: bool = True
    """Whether it takes configuration keys, rather than options and paths alone."""


SERVERS = {
    "vllm": "mtrl.engines.vllm.serve",
    "sglang": "mtrl.engines.sglang.serve",
    "retriever": "mtrl.retrieval",
    "environment": "mtrl.play.serve",
}
"""Server of `mtrl serve` -> its module. Those of the engines start in the engine's own environment."""
GROUPS: dict[str, dict[str, Subcommand]] = {
    "before a run": {
        "doctor": Subcommand("mtrl.doctor", "what this machine can do, and the memory that a run would take"),
        "preflight": Subcommand("mtrl.preflight", "checks of a task: hermetic, and no reward without success"),
        "play": Subcommand("mtrl.play", "be the policy at the keyboard"),
        "demonstrate": Subcommand("mtrl.demonstrate", "write a task's demonstrations as JSONL"),
        "sft": Subcommand("mtrl.sft", "fine-tune a model on conversations", takes_keys=False),
    },
    "train": {
        "train": Subcommand("mtrl.main", "train an agent; -m trains one for each combination of values"),
        "sweep": Subcommand("mtrl.sweep", "the table of a sweep's runs", takes_keys=False),
        "gateway": Subcommand("mtrl.gateway", "a policy behind OpenAI's API, for programs of your own"),
        "serve": Subcommand(SERVERS, "serve vllm, sglang, retriever or environment (MCP)", takes_keys=False),
    },
    "after a run": {
        "diagnose": Subcommand("mtrl.diagnose", "the symptoms of a run, and the one thing to change", takes_keys=False),
        "view": Subcommand("mtrl.view", "runs, trajectories and tokens in the browser", takes_keys=False),
        "evaluate": Subcommand("mtrl.evaluate", "any model on held-out rows"),
        "rescore": Subcommand("mtrl.rescore", "another reward or scorer on stored trajectories"),
        "figures": Subcommand("mtrl.figures", "figures of one run or many", takes_keys=False),
        "track": Subcommand("mtrl.track", "send a run to MLflow, W&B or TensorBoard", takes_keys=False),
    },
}
COMMANDS = {name: command for group in GROUPS.values() for name, command in group.items()}
COMPLETE = "--complete"
"""Option by which the script of a shell asks for completions of a line."""


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
    if first in ("completion", COMPLETE):
        from mtrl.cli import completion

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
