"""The choice of the weight sync that `weight_sync` and `lora` of an engine name."""

from __future__ import annotations

from mtrl.config.engine_schema import ServerConfig
from mtrl.engines.server.disk_sync import DiskSync
from mtrl.engines.server.distributed_sync import DistributedSync
from mtrl.engines.server.export import FullWeights
from mtrl.engines.server.lora_sync import AdapterSync, MergedWeights
from mtrl.engines.server.sync import WeightSync
from mtrl.engines.server.tensor_sync import TensorSync


def make_sync(settings: ServerConfig, *, model: str, dtype: str, lora_scaling: float | None) -> WeightSync:
    """Make the weight sync that `settings` selects.

    Args:
        model: folder or Hub name of the model that the servers start with.
        dtype: torch's name of the dtype of the servers' weights; the weights are sent in it.
        lora_scaling: factor of the product of the adapters if adapters are trained; `send` then receives adapters, by
            the names of `adapter_state`. None: full weights are trained.

    Raises:
        UserError: the selected sync cannot reach these servers.
    """
    if lora_scaling is not None and settings.lora == "adapter":
        return AdapterSync(settings, model, lora_scaling)
    export = FullWeights(model, dtype) if lora_scaling is None else MergedWeights(model, dtype, lora_scaling)
    match settings.weight_sync:
        case "disk":
            return DiskSync(settings, model, export)
        case "distributed":
            return DistributedSync(settings, export)
        case "tensor":
            return TensorSync(settings, export)
    raise ValueError(f"weight_sync={settings.weight_sync} is not disk, distributed or tensor")
