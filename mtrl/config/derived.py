"""Values that are derived from several keys of a configuration, or from keys and the machine."""

from __future__ import annotations

import importlib.util
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from mtrl.config.overrides import CONF
from mtrl.config.schema import Config
from mtrl.errors import UserError
from mtrl.utils.gpus import visible_gpus

PROGRAM_KEYS = ("target", "command", "url")
"""Keys of `generator.agent` that name the program; at most one may be set."""
SHARED_GPU, OWN_GPU = 0.4, 0.8
"""Share of a GPU's memory for a server beside a rank that trains, and on a GPU of its own."""
SEQUENCES = 128
"""Number of trajectories that an engine holds at once, if its memory is not known."""
SERVER_SEQUENCES = (32, 512)
"""Bounds of the number of turns that a server on a GPU samples at once, by default. CUDA graphs of more rows need more
memory than they save time."""
LOGITS = {"cpu": 2**24}
"""Maximum number of logits in memory at once by device type, if `trainer.max_logits_per_chunk` is null; 2^27 on other
devices. On a CPU, smaller arrays cost no time."""
PREFILL_TOKENS = 16384
"""Maximum number of new tokens, padding included, in one prefill pass of the embedded engine."""
WEIGHT_BUCKET = 2**29
"""Maximum size, in bytes, of the weights that are gathered or sent at once, unless a single tensor is larger."""
COPY_BUCKET = 2**26
"""Maximum size, in bytes, of the weights that a single rank copies at once, unless a single tensor is larger. It sends
nothing to other ranks, so that many small buckets cost little time."""
SERVER_ALLOWANCE = 4 * 2**30
"""Bytes of a server's share that are neither weights nor keys and values: CUDA's context, prefill, CUDA graphs."""
CACHE_SHARE = 0.5
"""Share of the memory that weights and optimiser leave free on a GPU for the keys and values of the embedded engine.
The other part is for the activations of the update."""


def ranks() -> int:
    """Return the number of processes that `torchrun` has started for this job."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def ranks_here() -> int:
    """Return the number of processes of this job on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", ranks()))


def ranks_per_batch(trainer: Any) -> int:
    """Return the number of ranks that share each micro-batch: those that share its sequences, or divide the matrices
    that compute them."""
    return trainer.sequence_parallel * trainer.tensor_parallel


def of_machine(name: str, root: DictConfig) -> Any:
    """Return a setting of the engine that depends on the GPUs of this machine (`${machine:NAME}` in
    `conf`).

    Args:
        name: `has_gpu`; `backend`: an engine that is installed if there is a GPU, else `local`; `colocate`: true if
            ranks train on all GPUs; `replicas`: the number of servers for which there are GPUs;
            `gpu_memory_utilization`.
        root: the whole configuration.
    """
    gpus = 0 if root.model.device == "cpu" else visible_gpus()
    if name == "has_gpu":
        return gpus > 0
    if name == "backend":
        return (installed_engine(root) or "local") if gpus else "local"
    settings = root.generator[root.generator.backend] if serves(root) else None
    if settings is None or settings.urls or not gpus:
        return {"colocate": False, "replicas": 1, "gpu_memory_utilization": OWN_GPU}[name]
    colocated = ranks_here() >= gpus and not overlaps(root)
    if name == "colocate":
        return colocated
    if name == "gpu_memory_utilization":
        return SHARED_GPU if settings.colocate else OWN_GPU
    free = ranks_here() if settings.colocate else gpus - ranks_here()
    return max(1, free // settings.tensor_parallel_size)


OmegaConf.register_new_resolver("machine", lambda name, *, _root_: of_machine(name, _root_), replace=True)


def prefers_bfloat16(cfg: DictConfig | Config) -> bool:
    """Return whether forward and backward passes are in bfloat16 on a GPU or CPU that multiplies it, because
    `trainer.fsdp.param_dtype` is null and the model is pretrained."""
    return cfg.trainer.fsdp.param_dtype is None and cfg.model.name != "tiny" and cfg.model.dtype == "float32"


def may_be_sharded(cfg: DictConfig) -> bool:
    """Return whether models are sharded, or may be on some machine: over several ranks, or on one rank for settings
    that only FSDP supports."""
    fsdp = cfg.trainer.fsdp
    return ranks() > 1 or fsdp.param_dtype is not None or bool(fsdp.cpu_offload) or prefers_bfloat16(cfg)


def overlaps(cfg: DictConfig | Config) -> bool:
    """Return whether turns are sampled while the policy is updated."""
    return cfg.async_config.max_steps_off_policy > 0


def distils(cfg: DictConfig | Config) -> bool:
    """Return whether a teacher scores the sampled tokens."""
    teacher = cfg.distillation.teacher
    return bool(cfg.distillation.weight) and (teacher.path is not None or teacher.url is not None)


def sums_top_tokens(cfg: DictConfig | Config) -> bool:
    """Return whether the loss of each token has a sum over the teacher's most probable tokens."""
    return distils(cfg) and cfg.distillation.top_k > 0


def local_replicas(cfg: DictConfig | Config) -> int:
    """Return the number of copies of the embedded engine. By default it is one on each GPU on which a rank of this
    machine trains."""
    local = cfg.generator.local
    if local.replicas is not None:
        return int(local.replicas)
    trains_on_gpus = ranks() > 1 and cfg.model.device != "cpu" and visible_gpus() >= ranks_here()
    return ranks_here() if trains_on_gpus and local.process is not False else 1


def in_a_process(cfg: DictConfig | Config) -> bool:
    """Return whether the embedded engine runs in processes of its own."""
    chosen = cfg.generator.local.process
    return overlaps(cfg) or local_replicas(cfg) > 1 if chosen is None else bool(chosen)


def serves(cfg: DictConfig | Config) -> bool:
    """Return whether inference servers, each with its own copy of the weights, sample the turns."""
    return cfg.generator.backend != "local"


def sequences(cfg: DictConfig | Config) -> int:
    """Return the maximum number of trajectories that an engine holds at once, before the memory of a GPU limits it."""
    return int(cfg.generator.max_num_seqs or SEQUENCES)


def max_logits(cfg: DictConfig | Config, device: str) -> int:
    """Return the maximum number of logits (tokens x vocabulary) in memory at once on this type of device."""
    return int(cfg.trainer.max_logits_per_chunk or LOGITS.get(device, 2**27))


def cache_capacity(tokens: int) -> int:
    """Return the allocated length of a row of the embedded engine's cache that needs `tokens` tokens: 64, 128, … 1,024,
    1,280, 1,536, 1,792, 2,048, 2,560, …, so that a long row takes at most a quarter more than it needs."""
    size = doubled_capacity(tokens)
    step = size // 8
    return size if size <= 1024 else -(-tokens // step) * step


def doubled_capacity(tokens: int) -> int:
    """Return the next power of two, at least 64: the capacity where other lengths cost more than memory, as with
    CUDA graphs. See `cache_capacity`."""
    return 1 << max(6, (tokens - 1).bit_length())


def cache_budget(free: int, reserved: int) -> int:
    """Return the number of bytes for the keys and values of the embedded engine on a GPU.

    Args:
        free: bytes that are free when the weights are loaded.
        reserved: bytes of gradients and moments, which the first update allocates.
    """
    return int(CACHE_SHARE * max(0, free - reserved))


def server_sequences(room: int, conversation: int) -> int:
    """Return the number of turns that a server samples at once, if `generator.max_num_seqs` is null: four for each
    conversation of maximum length that its memory holds, since most conversations are shorter, and a server that runs
    out of memory only delays turns.

    Args:
        room: bytes for keys and values on one GPU of the server.
        conversation: bytes of the longest conversation on that GPU.
    """
    fewest, most = SERVER_SEQUENCES
    return min(most, max(fewest, 4 * room // conversation))


def is_deterministic(cfg: DictConfig | Config) -> bool:
    """Return whether turns wait for each other, so that the composition of decoding batches does not depend on time."""
    chosen = cfg.generator.local.deterministic
    return not serves(cfg) and (not overlaps(cfg) if chosen is None else bool(chosen))


def prompt_of(cfg: DictConfig | Config) -> str:
    """Return the kind of the prompts: `environment.prompt`, where auto means short for the tiny policy, else full."""
    chosen = str(cfg.environment.prompt)
    return chosen if chosen != "auto" else "short" if cfg.model.name == "tiny" else "full"


def runs_agent(cfg: DictConfig | Config) -> bool:
    """Return whether an agent program runs the episodes, instead of the environment."""
    return any(getattr(cfg.generator.agent, key) is not None for key in PROGRAM_KEYS)


def program_path() -> str:
    """Return the PATH for agent programs. The folder of this interpreter comes first, so that `python` is the
    interpreter that trains."""
    return os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))


def installed_engine(cfg: DictConfig) -> str | None:
    """Return the name of an engine whose environment exists, vLLM first; None if there is none."""
    for name in ("vllm", "sglang"):
        with suppress(UserError):
            engine_python(name, cfg.generator[name].python)
            return name
    return None


def engine_python(name: str, chosen: str | None) -> str:
    """Return the Python interpreter for an engine. The candidates, in order: `chosen`; the environment variable
    `MTRL_VLLM_PYTHON` or `MTRL_SGLANG_PYTHON`; the virtual environment that `engine_installation` makes; this
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
        f"{engine_installation(name)}, or name its interpreter by {key}=PATH"
    )


def engine_installation(name: str) -> str:
    """Return the command that installs an engine where `engine_python` finds it: the script of a checkout, or for an
    installed distribution, which has no scripts, a virtual environment in the current folder."""
    if (CONF.parent / "scripts" / "install_engine.py").exists():
        return f"python scripts/install_engine.py {name}"
    return f"python -m venv .venv-{name} && .venv-{name}/bin/pip install 'mtrl-agents[{name}]'"
