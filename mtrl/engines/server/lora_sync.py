"""Weight sync of LoRA adapters to servers: merged into the weights that the servers started with, or as adapters."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from mtrl.config.engine_schema import ServerConfig
from mtrl.engines.server.export import in_precision
from mtrl.engines.server.model_folder import HEAD, is_tied, model_folder, model_shapes
from mtrl.engines.server.server_api import ServerApi
from mtrl.engines.server.sync import UpdateSteps, engine_key
from mtrl.engines.server.sync_folder import SyncFolder
from mtrl.errors import UserError
from mtrl.models.lora import check_matrices, merged_tensors, save_adapter_files


class MergedWeights:
    """A `WeightExport` that merges adapters into full weights.

    The initial weights W0 stay in their files (memory-mapped, so that the system can evict unused pages). They are
    merged again for each version: W0 in the servers' precision plus the product of the adapters in float32, rounded
    once, as in the trainer's own engine (`LoraWeights`).
    """

    def __init__(self, model: str, dtype: str, scaling: float):
        self._model, self._dtype, self._scaling = model, getattr(torch, dtype), scaling

    def __call__(self, trained: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        adapters = {name: value.detach().cpu() for name, value in trained.items()}
        start = start_weights(self._model)
        try:
            check_matrices(model_shapes(self._model), adapters)
        except ValueError as error:
            raise UserError(f"model.path={self._model}: {error}; use generator.backend=local for this model") from error
        return merged_tensors(
            ((name, in_precision(value, self._dtype)) for name, value in start), adapters, self._scaling
        )


def start_weights(model: str) -> Iterator[tuple[str, Tensor]]:
    """Return the names and tensors of a model's safetensors files, tied ones once, each read when it is taken.

    Raises:
        UserError: the model has no safetensors files.
    """
    folder = model_folder(model)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError(
            f"model.path={model} has no safetensors files, so that adapters cannot be merged into its weights for the "
            "servers; save it by save_pretrained first"
        )
    return _read(files, is_tied(folder))


def _read(files: Sequence[Path], tied: bool) -> Iterator[tuple[str, Tensor]]:
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            names = list(tensors.keys())
            yield from ((name, tensors.get_tensor(name)) for name in names if not (tied and name == HEAD))


class AdapterSync:
    """A `WeightSync` that loads each version as a separate adapter (`adapter_name`), in addition to the loaded ones.

    Every turn names the adapter that samples it, so that no pause is needed and no cache is dropped. `Adapters` drops
    an adapter that no turn uses any more (`ServerApi.drop_adapter`).
    """

    def __init__(self, settings: ServerConfig, model: str, scaling: float):
        self._seconds, self._model, self._scaling = settings.sync_timeout, model, scaling
        self._folder = SyncFolder(settings.sync_folder, f"{engine_key(settings)}.sync_folder")
        self._written: list[str] = []
        self.sent_bytes = 0

    async def prepare(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Do nothing: servers do not pause for adapters."""

    async def send(self, servers: Sequence[ServerApi], weights: Mapping[str, Tensor], version: int) -> None:
        """`weights`: tensors of the adapters, by the names of `adapter_state`."""
        name = adapter_name(version)
        write = partial(save_adapter_files, weights, self._scaling, self._model)
        size = self.sent_bytes = sum(value.nbytes for value in weights.values())
        folder = await asyncio.to_thread(self._folder.write, name, size, write)
        steps = UpdateSteps(servers)
        await steps.each(lambda server: server.load_adapter(name, str(folder)), self._seconds)
        if name not in self._written:
            self._written.append(name)
        while len(self._written) > 2:  # the last but one stays, because a server may still be loading it
            await asyncio.to_thread(self._folder.remove, self._written.pop(0))
        steps.check()

    async def close(self) -> None:
        await asyncio.to_thread(self._folder.close)


def adapter_name(version: int) -> str:
    """Return the servers' name of the adapter of a policy version."""
    return f"policy-{version}"
