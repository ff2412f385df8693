"""Weight sync by files: for every engine and device, if the servers see the trainer's file system."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from torch import Tensor

from mtrl.config.engine_schema import ServerConfig
from mtrl.engines.server.checksum import checksum
from mtrl.engines.server.export import WeightExport
from mtrl.engines.server.model_folder import copy_settings
from mtrl.engines.server.server_api import ServerApi
from mtrl.engines.server.sync import UpdateSteps, engine_key
from mtrl.engines.server.sync_folder import SyncFolder

SHARD = 5 * 10**9
"""Maximum size of one file of weights, in bytes."""


class DiskSync:
    """See `WeightSync`. Servers load one Hugging Face folder per version, in the way in which they load the model at
    their start.

    The newest folder stays until the next one is written, because engines remember the path of their weights.
    """

    def __init__(self, settings: ServerConfig, model: str, export: WeightExport):
        self._seconds, self._model, self._export = settings.sync_timeout, model, export
        self._folder = SyncFolder(settings.sync_folder, f"{engine_key(settings)}.sync_folder")
        self._uses: dict[str, int] = {}
        """Number of calls of `send` that use a folder, by its name."""
        self._newest = ""
        self.sent_bytes = 0
        self._prepared: tuple[Mapping[str, Tensor], Path, str] | None = None
        """The weights that were written last, their folder and its checksum."""

    async def prepare(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Write the folder, for which servers need not pause."""
        await asyncio.to_thread(self._write, weights, version)

    async def send(self, servers: Sequence[ServerApi], weights: Mapping[str, Tensor], version: int) -> None:
        folder, digest = await asyncio.to_thread(self._write, weights, version)
        name = folder.name
        self._uses[name] = self._uses.get(name, 0) + 1
        try:
            self._newest = name
            steps = UpdateSteps(servers)
            await steps.each(lambda server: server.begin_update(), self._seconds)
            await steps.each(lambda server: server.receive_folder(str(folder), version, digest), self._seconds)
            await steps.each(lambda server: server.end_update(version), self._seconds)
        finally:
            self._uses[name] -= 1
            await asyncio.to_thread(self._remove_unused)
        steps.check()

    async def close(self) -> None:
        await asyncio.to_thread(self._folder.close)

    def _write(self, weights: Mapping[str, Tensor], version: int) -> tuple[Path, str]:
        """Return the folder of these weights and its checksum; write the folder unless it is the last one."""
        prepared = self._prepared
        if prepared is not None and prepared[0] is weights and prepared[1].exists():
            return prepared[1:]
        self._prepared = prepared = None
        whole = dict(self._export(weights))
        digest = checksum(whole)
        size = self.sent_bytes = sum(value.nbytes for value in whole.values())
        name = f"version-{version}-{digest[:12]}"
        folder = self._folder.write(name, size, partial(write_model, self._model, whole))
        self._prepared = weights, folder, digest
        return folder, digest

    def _remove_unused(self) -> None:
        for name in [name for name, uses in self._uses.items() if not uses and name != self._newest]:
            del self._uses[name]
            self._folder.remove(name)


def write_model(model: str, weights: Mapping[str, Tensor], folder: Path) -> None:
    """Write a Hugging Face folder with these weights and the other files of `model`. Weights above 5 GB are split into
    several files."""
    from huggingface_hub import save_torch_state_dict

    copy_settings(model, folder)
    save_torch_state_dict(dict(weights), folder, max_shard_size=SHARD, metadata={"format": "pt"})
