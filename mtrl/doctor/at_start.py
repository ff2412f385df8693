"""The memory plan at the start of a run, for the GPUs or the main memory of this machine."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from mtrl.config.derived import ranks, ranks_here, serves
from mtrl.config.schema import Config
from mtrl.doctor.architecture import Architecture, find
from mtrl.doctor.layout import GIB
from mtrl.doctor.machine import memory
from mtrl.doctor.memory import main_memory
from mtrl.doctor.plan import plan_run
from mtrl.doctor.plan_report import verdict
from mtrl.errors import UserError
from mtrl.trainer.loading import pick_device


def plan_at_start(config: Config, note: Callable[[str], None], warn: Callable[[str], None]) -> None:
    """Show in one line whether a run fits the free memory of its GPUs, or of the machine if it has none, as a warning
    if it does not. Runs of the tiny policy show nothing, nor do runs on a CPU whose servers sample, since the servers
    take memory of their own.

    Args:
        note, warn: functions that show a line.
    """
    if config.model.name == "tiny":
        return
    device = None
    if pick_device(config.model.device).type == "cuda":
        config = _placed(config)
    elif serves(config) or (found := memory()) is None:
        return
    else:
        device = main_memory(found[1], ranks_here())
    try:
        plan = plan_run(config, _architecture(str(config.model.path)), device=device)
    except UserError as error:
        note(f"memory is not planned: {error}")
        return
    (note if plan.fits else warn)("memory: " + verdict(plan).plain.replace("\n", "; "))


def _placed(config: Config) -> Config:
    """Return the configuration with the GPUs of this machine and their free memory as its placement."""
    import torch

    free, _ = torch.cuda.mem_get_info()
    here = ranks_here()
    placement = replace(
        config.placement,
        machines=max(1, ranks() // here),
        ranks=here,
        gpus=torch.cuda.device_count(),
        gpu_memory=free / GIB,
    )
    return replace(config, placement=placement)


def _architecture(path: str) -> Architecture:
    """Return the sizes of a model in a folder, in the table of known models, or in the cache of the Hub.

    Raises:
        UserError: the sizes are not known.
    """
    try:
        return find(path)
    except UserError:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError

        cached = None
        with suppress(HFValidationError):  # a path that is no name of the Hub
            cached = try_to_load_from_cache(path, "config.json")
        if not isinstance(cached, str):
            raise
        return find(str(Path(cached).parent))
