"""The launch settings of an engine's servers, independent of the engine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mtrl.config.engine_schema import ServerConfig
from mtrl.engines.server.backend import ServerCommand, ServerPlace
from mtrl.engines.server.sync import engine_key
from mtrl.errors import UserError
from mtrl.utils.gpus import gpu_names


@dataclass(frozen=True)
class Launch:
    """Settings that are the same for all servers of an engine; `vllm/command.py` and `sglang/command.py` make a
    `ServerCommand` from them."""

    settings: ServerConfig
    model: str
    """Folder or Hub name of the model."""
    context: int
    """Maximum number of tokens of a whole conversation."""
    max_num_seqs: int
    """Maximum number of turns that one server samples at once."""
    gpu_memory_utilization: float
    """Share of the GPU's memory for weights, keys and values."""
    dtype: str
    """Dtype of the weights: float32, bfloat16 or float16."""
    python: str
    """Path of the interpreter of the engine's environment."""
    is_cpu: bool
    """Whether the servers run without a GPU."""
    max_lora_rank: int = 0
    """Rank of the adapters that the servers will load; 0: no adapters."""

    def arguments(self, own: Mapping[str, Any], refused: Mapping[str, str], joint: str) -> dict[str, Any]:
        """Return the arguments `own`, overridden by `generator.<engine>.args`, whose names may have any spelling
        (`--max-num-seqs`, `max_num_seqs`).

        Args:
            refused: names of arguments that the user may not set, and the reason.
            joint: character between the options of a name, in the result and in `own` and `refused`.

        Raises:
            UserError: `args` has a refused argument.
        """
        chosen = {str(n).lstrip("-").replace("-", joint).replace("_", joint): v for n, v in self.settings.args.items()}
        for name in chosen:
            if name in refused:
                raise UserError(
                    f"{engine_key(self.settings)}.args has {name}, which cannot be set: {refused[name]}; remove it"
                )
        return {**own, **chosen}

    def command(
        self, module: str, arguments: Mapping[str, Any], env: Mapping[str, str], token: str, place: ServerPlace
    ) -> ServerCommand:
        """Return the command `python -m module` with these arguments.

        Args:
            arguments: values by name. True becomes a bare flag; None and False are left out; a list becomes several
                options, a mapping becomes JSON.
            env: environment variables that the engine needs; `settings.env` overrides them.
            token: name of the environment variable for the server's token.

        Raises:
            UserError: this process does not see the server's GPUs.
        """
        options = [option for name, value in arguments.items() for option in _option(name.replace("_", "-"), value)]
        ours = {
            "TOKENIZERS_PARALLELISM": "false",
            # gloo listens by default at the address of the host name, and it needs no password.
            "GLOO_SOCKET_IFNAME": "lo",
        }
        if self.is_cpu:  # with two threads, a small model is many times slower
            ours |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        elif place.devices is not None:
            ours["CUDA_VISIBLE_DEVICES"] = ",".join(gpu_names(place.devices))
        return ServerCommand(
            [self.python, "-m", module, *options], {**ours, **env, **self.settings.env, token: place.token}
        )


def _option(name: str, value: Any) -> list[str]:
    if value is None or value is False:
        return []
    if value is True:
        return [f"--{name}"]
    if isinstance(value, Mapping):
        return [f"--{name}", json.dumps(dict(value))]
    values = value if isinstance(value, list | tuple) else [value]
    return [f"--{name}", *map(str, values)]
