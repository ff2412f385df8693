"""What the servers of an engine are started with, before it is put into the engine's words."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mtrl.config.engine_schema import ServerConfig
from mtrl.errors import UserError
from mtrl.generator.engines.server.backend import Command, Place
from mtrl.generator.engines.server.sync import engine_key


@dataclass(frozen=True)
class Launch:
    """The same for all servers of an engine; `vllm/command.py` and `sglang/command.py` make a `Command` of it."""

    settings: ServerConfig
    model: str
    """Folder or Hub name."""
    context: int
    """Tokens of a whole conversation."""
    max_num_seqs: int
    """Turns that one server samples at once."""
    gpu_memory_utilization: float
    """Share of the GPU's memory for weights, keys and values."""
    dtype: str
    """float32, bfloat16 or float16."""
    python: str
    """Interpreter of the engine's environment."""
    is_cpu: bool
    """Whether they have to do without a GPU."""
    max_lora_rank: int = 0
    """Rank of the adapters that they will be given; 0: none."""

    def arguments(self, own: Mapping[str, Any], refused: Mapping[str, str], joint: str) -> dict[str, Any]:
        """`own`, and over them `generator.<engine>.args`, however they are written (`--max-num-seqs`, `max_num_seqs`).

        Args:
            refused: names that the user may not set, and why.
            joint: what the words of a name have between them, here and in `own` and `refused`.

        Raises:
            UserError: `args` has one of those.
        """
        chosen = {str(n).lstrip("-").replace("-", joint).replace("_", joint): v for n, v in self.settings.args.items()}
        for name in chosen:
            if name in refused:
                raise UserError(
                    f"{engine_key(self.settings)}.args has {name}, which is not to be set: {refused[name]}; take it out"
                )
        return {**own, **chosen}

    def command(
        self, module: str, arguments: Mapping[str, Any], env: Mapping[str, str], token: str, place: Place
    ) -> Command:
        """`python -m module`, with these arguments.

        Args:
            arguments: True is a bare flag; None and False are left out; a list is several words, a mapping is JSON.
            env: variables that the engine needs; those of `settings.env` come over them.
            token: variable that holds the server's token.
        """
        words = [word for name, value in arguments.items() for word in _words(name.replace("_", "-"), value)]
        ours = {
            "TOKENIZERS_PARALLELISM": "false",
            # gloo would listen at the address that the machine's name leads to, and it asks nobody for a password.
            "GLOO_SOCKET_IFNAME": "lo",
        }
        if self.is_cpu:  # with two threads a small model is many times slower
            ours |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        elif place.devices is not None:
            ours["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, place.devices))
        return Command([self.python, "-m", module, *words], {**ours, **env, **self.settings.env, token: place.token})


def _words(name: str, value: Any) -> list[str]:
    if value is None or value is False:
        return []
    if value is True:
        return [f"--{name}"]
    if isinstance(value, Mapping):
        return [f"--{name}", json.dumps(dict(value))]
    values = value if isinstance(value, list | tuple) else [value]
    return [f"--{name}", *map(str, values)]
