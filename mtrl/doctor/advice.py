"""Advice on the runs that this machine can execute, with their commands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mtrl.config.derived import engine_installation
from mtrl.doctor.layout import GIB
from mtrl.doctor.memory import COMFORT
from mtrl.doctor.plan import Plan, make_plan

DEFAULT = "mtrl train"
PLAN = "mtrl doctor --plan model=qwen3_8b placement=8_gpus generator.backend=vllm"
LADDER = ("qwen3_14b", "qwen3_8b", "qwen3_4b", "qwen3_1_7b", "qwen3_0_6b")
"""Names of the models to propose, the largest first."""
EIGHT = 8
TASK = "experiment=sop_hf"


@dataclass(frozen=True)
class Advice:
    """An action on this machine, and its command."""

    what: str
    command: str


def advise(gpus: Sequence[tuple[str, int]], engine: str | None) -> list[Advice]:
    """Return the advice; the largest model comes first.

    Args:
        gpus: name and memory, in bytes, of each GPU.
        engine: an installed engine, vllm or sglang; None if neither is installed.
    """
    tiny = Advice("train a tiny policy on the CPU, in minutes", DEFAULT)
    if not gpus:
        return [tiny, Advice("see what a real model would need", PLAN)]
    size = min(size for _, size in gpus) / GIB
    placement = "8_gpus" if len(gpus) >= EIGHT else "1_gpu"
    found = [] if engine else [Advice("install an engine first", engine_installation("vllm"))]
    for model in LADDER:
        words = f"{TASK} model={model} placement={placement} generator.backend={engine or 'vllm'}"
        plan = make_plan([*words.split(), f"placement.gpu_memory={size:.1f}"])
        if plan.fits and -plan.tightest.over > COMFORT * size * GIB:
            where = f"{EIGHT} GPUs" if placement == "8_gpus" else "1 GPU"
            what = f"train {model} on {where} of {size:.0f} GiB, by the estimate (not tried)"
            return [*found, Advice(what, f"{launcher(plan)} {words}"), tiny]
    return [tiny]


def launcher(plan: Plan) -> str:
    """Return the command that starts the ranks of a plan; several machines need the address of the first one, too."""
    layout = plan.memory.layout
    if layout.ranks == 1:
        return DEFAULT
    nodes = "--standalone" if layout.ranks == layout.ranks_here else f"--nnodes {layout.ranks // layout.ranks_here}"
    return f"torchrun {nodes} --nproc-per-node {layout.ranks_here} -m mtrl.main"
