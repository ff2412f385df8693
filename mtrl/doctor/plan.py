"""mtrl doctor --plan: whether a run fits its GPUs or the main memory of this machine, by how much, and a
change that makes it fit."""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from omegaconf import DictConfig, OmegaConf

from mtrl.command.checks import check
from mtrl.command.compose import merge
from mtrl.command.engine_checks import check_sampling
from mtrl.config.overrides import normalise
from mtrl.config.schema import Config
from mtrl.doctor.architecture import Architecture, find
from mtrl.doctor.changes import Change, apply, possible_changes
from mtrl.doctor.layout import GIB, ranks_here
from mtrl.doctor.limits import check_limits
from mtrl.doctor.machine import memory as machine_memory
from mtrl.doctor.memory import Device, Memory, Moment, main_memory
from mtrl.doctor.recomputation import fewest_recomputed
from mtrl.errors import UserError

OF_GPUS = (
    *("trainer.fsdp", "trainer.optimizer.offload", "trainer.activation_offload"),
    *("placement", "generator.gpu_memory_utilization"),
)
"""Settings that lower the need of a GPU, and not that of main memory."""


@dataclass(frozen=True)
class Plan:
    """The memory plan of one configuration."""

    path: str
    memory: Memory
    moments: tuple[Moment, ...]
    gpus: int
    """Number of GPUs of each machine, from the placement or else the number that the run needs."""
    warnings: tuple[str, ...]
    change: Change | None
    """Settings that make the run fit; None if it fits already, or if no known change suffices."""

    @property
    def tightest(self) -> Moment:
        return max(self.moments, key=lambda moment: moment.over)

    @property
    def crowd(self) -> int:
        """Number of GPUs that the first machine lacks."""
        if self.memory.device.kind == "cpu":
            return 0
        return max(0, self.memory.layout.gpus_needed - self.gpus)

    @property
    def fits(self) -> bool:
        return self.tightest.over <= 0 and not self.crowd

    @property
    def faster(self) -> Change:
        """Settings with which the run recomputes the fewest layers that fit; empty if it already does, or does not
        fit."""
        return fewest_recomputed(self.memory) if self.fits else {}


def make_plan(overrides: Sequence[str], config_dir: str | None = None) -> Plan:
    """Compose the configuration that `mtrl train OVERRIDES` would run, and plan its memory.

    Raises:
        UserError: the configuration is invalid, or the model's sizes are unknown.
    """
    return plan_of(merge(normalise(overrides, config_dir), config_dir))


def plan_of(cfg: DictConfig) -> Plan:
    """Compute the memory that a run needs on the machines of its placement.

    All checks of a run are made, as if its engine were installed and its ranks were started.

    Raises:
        UserError: see `make_plan`.
    """
    cfg = cfg.copy()
    refuse_tiny(cfg)
    with _elsewhere(cfg):
        OmegaConf.resolve(cfg)  # resolving is slow, so it is done once
        warnings = check(cfg)
    check_sampling(cfg)
    model = find(str(cfg.model.path))
    check_limits(_typed(cfg), model)
    device = None
    if cfg.model.device == "cpu":
        if (found := machine_memory()) is None:
            raise UserError("model.device=cpu: the main memory of this machine is unknown, so that no plan can be made")
        device = main_memory(found[0], ranks_here(cfg.placement))
    return plan_run(_typed(cfg), model, warnings, device)


def refuse_tiny(cfg: DictConfig) -> None:
    """Raise a UserError for the tiny policy, which needs no plan."""
    if cfg.model.name == "tiny":
        raise UserError(
            "model=tiny has under a million parameters and fits every machine; plan another, for example model=qwen3_8b"
        )


def plan_run(config: Config, model: Architecture, warnings: Sequence[str] = (), device: Device | None = None) -> Plan:
    """Compute the memory of a checked configuration.

    Args:
        device: device of a rank; None: a GPU of the placement.
    """
    memory = Memory(config, model, device)
    gpus = config.placement.gpus or memory.layout.gpus_needed
    plan = Plan(str(config.model.path), memory, tuple(memory.moments()), gpus, tuple(warnings), None)
    return plan if plan.fits else replace(plan, change=_mend(config, model, device))


@contextmanager
def _elsewhere(cfg: DictConfig) -> Iterator[None]:
    """Simulate the environment of another machine for the checks: with the ranks of the placement, with its GPUs, or as
    many as ranks, and with engines."""
    variables = {f"MTRL_{name}_PYTHON": sys.executable for name in ("VLLM", "SGLANG")}
    here = ranks_here(cfg.placement)
    variables |= {"WORLD_SIZE": str(here * cfg.placement.machines), "LOCAL_WORLD_SIZE": str(here)}
    variables["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(cfg.placement.gpus or here)))
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _typed(cfg: DictConfig) -> Config:
    config: Config = OmegaConf.to_object(cfg)  # type: ignore[assignment]
    return config


def _mend(config: Config, model: Architecture, device: Device | None) -> Change | None:
    """Return the first change after which the run fits; changes with the least effect on the run are tried first."""
    gpus = config.placement.gpus if device is None else None
    for change in possible_changes(config, model):
        if device is not None and any(key.startswith(OF_GPUS) for key in change):
            continue
        changed = copy.deepcopy(config)
        apply(changed, change)
        memory = Memory(changed, model, device)
        crowded = gpus is not None and memory.layout.gpus_needed > gpus
        is_partial = 0 < memory.recomputed_layers < model.num_hidden_layers  # where one more layer costs little
        moments = memory.moments()
        if not crowded and all(m.is_comfortable if is_partial else m.over <= 0 for m in moments):
            return change
    return None


def to_json(plan: Plan) -> dict[str, Any]:
    """Return the whole plan; sizes are in bytes."""
    layout = plan.memory.layout
    return {
        "model": plan.path,
        "parameters": plan.memory.model.parameters,
        "trained_bytes": plan.memory.trained,
        "ranks": layout.ranks,
        "gpus_needed": layout.gpus_needed,
        "gpus": plan.gpus,
        "fits": plan.fits,
        "over": plan.tightest.over,
        "change": plan.change,
        "faster": plan.faster,
        "conversations": plan.memory.conversations(),
        "host": plan.memory.host(),
        "warnings": list(plan.warnings),
        "moments": [
            {
                "where": moment.where,
                "when": moment.when,
                "needed": moment.needed,
                "room": moment.room,
                "parts": {part.name: part.bytes for part in moment.parts},
            }
            for moment in plan.moments
        ],
    }


def gib(size: float) -> str:
    return f"{size / GIB:,.1f}"
