"""The memory plan at the start of a run on GPUs, for the GPUs of this machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from mtrl.config.derived import ranks, ranks_here
from mtrl.config.schema import Config
from mtrl.doctor.architecture import Architecture, find
from mtrl.doctor.layout import GIB
from mtrl.doctor.plan import plan_run
from mtrl.doctor.plan_report import verdict
from mtrl.errors import UserError


def plan_at_start(config: Config, note: Callable[[str], None], warn: Callable[[str], None]) -> None:
    """Show in one line whether a run on GPUs fits their free memory, as a warning if it does not. Runs on a CPU and
    runs of the tiny policy show nothing.

    Args:
        note, warn: functions that show a line.
    """
    import torch

    if config.model.name == "tiny" or config.model.device == "cpu" or not torch.cuda.is_available():
        return
    free, _ = torch.cuda.mem_get_info()
    here = ranks_here()
    placement = replace(
        config.placement,
        machines=max(1, ranks() // here),
        ranks=here,
        gpus=torch.cuda.device_count(),
        gpu_memory=free / GIB,
    )
    try:
        plan = plan_run(replace(config, placement=placement), _architecture(str(config.model.path)))
    except UserError as error:
        note(f"memory is not planned: {error}")
        return
    (note if plan.fits else warn)("memory: " + verdict(plan).plain.replace("\n", "; "))


def _architecture(path: str) -> Architecture:
    """Return the sizes of a model in a folder, in the table of known models, or in the cache of the Hub.

    Raises:
        UserError: the sizes are not known.
    """
    try:
        return find(path)
    except UserError:
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(path, "config.json") if path.count("/") == 1 else None
        if not isinstance(cached, str):
            raise
        return find(str(Path(cached).parent))
