"""What follows from several keys of a configuration together, or from them and the machine."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

from omegaconf import DictConfig

from mtrl.config.overrides import CONF
from mtrl.config.schema import Config
from mtrl.errors import UserError

PROGRAM_KEYS = ("target", "command", "url")
"""Keys of `generator.agent` that name the program; at most one may be set."""


def ranks() -> int:
    """Return the number of processes that `torchrun` has started for this job."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_sharded(cfg: DictConfig) -> bool:
    """Return whether models are sharded: over several ranks, or on one rank for settings that only FSDP supports."""
    return ranks() > 1 or cfg.trainer.fsdp.param_dtype is not None or bool(cfg.trainer.fsdp.cpu_offload)


def overlaps(cfg: DictConfig | Config) -> bool:
    """Return whether turns are sampled while the policy is updated."""
    return cfg.async_config.max_steps_off_policy > 0


def serves(cfg: DictConfig | Config) -> bool:
    """Return whether inference servers, each with its own copy of the weights, sample the turns."""
    return cfg.generator.backend != "local"


def is_deterministic(cfg: DictConfig | Config) -> bool:
    """Return whether turns wait for each other, so that the composition of decoding batches does not depend on time."""
    chosen = cfg.generator.local.deterministic
    return not serves(cfg) and (not overlaps(cfg) if chosen is None else bool(chosen))


def prompt_of(cfg: DictConfig | Config) -> str:
    """Return the kind of the prompts: `environment.prompt`, where auto means short for the tiny policy, else full."""
    chosen = str(cfg.environment.prompt)
    return chosen if chosen != "auto" else "short" if cfg.model.name == "tiny" else "full"


def plays_agent(cfg: DictConfig | Config) -> bool:
    """Return whether an agent program runs the episodes, instead of the environment."""
    return any(getattr(cfg.generator.agent, key) is not None for key in PROGRAM_KEYS)


def program_path() -> str:
    """Return the PATH for agent programs. The folder of this interpreter comes first, so that `python` is the
    interpreter that trains."""
    return os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))


def engine_python(name: str, chosen: str | None) -> str:
    """Return the Python interpreter for an engine. The candidates, in order: `chosen`; the environment variable
    `MTRL_VLLM_PYTHON` or `MTRL_SGLANG_PYTHON`; the virtual environment of `scripts/install_engine.py`; this
    interpreter, if it has the engine.

    Raises:
        UserError: there is no such interpreter, or a named one cannot be executed.
    """
    key, variable = f"generator.{name}.python", f"MTRL_{name.upper()}_PYTHON"
    for source, path in ((key, chosen), (variable, os.environ.get(variable))):
        if path:
            if not os.access(path, os.X_OK):
                raise UserError(f"{source}={path} is no interpreter; name bin/python of the environment of {name}")
            return str(Path(path).absolute())
    for folder in (Path.cwd(), CONF.parent):
        python = folder / f".venv-{name}" / "bin" / "python"
        if os.access(python, os.X_OK):
            return str(python)
    found = importlib.util.find_spec(name)
    if found is not None and found.origin:  # without origin it is only a folder of that name
        return sys.executable
    raise UserError(
        f"generator.backend={name} needs {name} in a virtual environment of its own, and there is none; make it with "
        f"python scripts/install_engine.py {name}, or name its interpreter by {key}=PATH"
    )
