"""The subcommands of `mtrl`, grouped by when they are needed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


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
