"""Receives new weights in a vLLM worker: from files, by broadcast (whole or as changes), or from shared memory.

This module runs inside the engine's environment. vLLM 0.32 itself cannot receive weights on a CPU, nor from files.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from mtrl.distributed import broadcast
from mtrl.engines.server.changes import TensorChanges, message_size
from mtrl.engines.server.checksum import checksum
from mtrl.engines.vllm.adapters import spare_plain_turns
from mtrl.engines.vllm.kept import KeptWeights
from mtrl.engines.vllm.payload import unpack
from mtrl.engines.vllm.reload import Reload


@dataclass
class GroupInfo(WeightTransferInitInfo):
    """An order outside an update: to join or leave a group, or to check the kept weights."""

    join: dict[str, Any] | None = None
    """Group to join: `backend, host, port, world_size, name` as for `broadcast.join_group`; `rank_offset`, the rank of
    this server's first worker; `seconds`, the timeout of the meeting and of every broadcast."""
    leave: str | None = None
    """Name of the group to leave."""
    kept: int | None = None
    """Policy version of the weights that the worker must keep, because changes from them follow."""


@dataclass
class Step(WeightTransferUpdateInfo):
    """One step of an update."""

    kind: str
    """Kind of the step: folder | broadcast | changes | tensors | check | abandon"""
    value: Any = None
    """Value by kind. folder: its path | broadcast: `{"group": name, "tensors": [{"name", "dtype", "shape"}, …]}` |
    changes: `{"group": name, "base": version | None, "version", "tensors": [fields of TensorChanges, …]}` |
    tensors: a payload for each worker, by rank, see `payload` | abandon: the reason"""
    checksum: str | None = None
    """The trainer's checksum of the whole tensors of this step; None: it is not compared."""


class WeightReceiver(WeightTransferEngine[GroupInfo, Step]):
    """The weight receiver of one worker. A failed step ends its update; another update can begin afterwards."""

    init_info_cls = GroupInfo
    update_info_cls = Step

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._groups: dict[str, broadcast.GroupMembership] = {}
        self._seconds: dict[str, float] = {}
        self._reload: Reload | None = None
        self._kept = KeptWeights()
        if self.vllm_config.lora_config is not None and self.device.type == "cpu":
            spare_plain_turns()

    def init_transfer_engine(self, init_info: GroupInfo) -> None:
        if init_info.leave is not None:
            self._leave(init_info.leave)
        if (join := init_info.join) is not None:
            workers = self.parallel_config
            rank = join["rank_offset"] + workers.data_parallel_index * workers.world_size + workers.rank
            name, seconds = join["name"], join["seconds"]
            self._groups[name] = broadcast.join_group(
                join["backend"], join["host"], join["port"], join["world_size"], rank, name, seconds
            )
            self._seconds[name] = seconds
        if init_info.kept is not None:
            self._kept.check(init_info.kept)

    def start_weight_update(self) -> None:
        self._kept.begin()
        self._reload = Reload(self.model, self.model_config)

    def receive_weights(self, update_info: Step) -> None:
        if self._reload is None:
            raise RuntimeError("no update has begun")
        try:
            self._take(update_info, self._reload)
        except BaseException:
            self._reload.abandon()
            self._reload, self._kept = None, KeptWeights()
            raise

    def finish_weight_update(self) -> None:
        if self._reload is None:
            raise RuntimeError("no update has begun")
        self._reload.finish()
        self._reload = None
        self._kept.finish()

    def shutdown(self) -> None:
        for name in list(self._groups):
            self._leave(name)

    def _take(self, step: Step, reload: Reload) -> None:
        match step.kind:
            case "folder":
                weights = read_folder(Path(step.value))
            case "broadcast":
                weights = self._receive(step.value["group"], step.value["tensors"])
            case "changes":
                weights = self._receive_changes(**step.value)
            case "tensors":
                weights = unpack(step.value[self.parallel_config.rank])
            case "check":
                reload.check()
                return
            case _:
                raise RuntimeError(f"the update was given up: {step.value}")
        if step.checksum is not None and (ours := checksum(weights)) != step.checksum:
            raise ValueError(
                f"the {len(weights)} tensors that arrived have the checksum {ours}, the trainer's is {step.checksum}"
            )
        reload.take(weights)

    def _receive(self, name: str, layouts: list[dict[str, Any]]) -> dict[str, Tensor]:
        dtypes, shapes = ([layout[key] for layout in layouts] for key in ("dtype", "shape"))
        tensors = self._broadcast(name, dtypes, shapes)
        return {layout["name"]: tensor for layout, tensor in zip(layouts, tensors, strict=True)}

    def _receive_changes(
        self, group: str, base: int | None, version: int, tensors: list[dict[str, Any]]
    ) -> dict[str, Tensor]:
        changes = [TensorChanges.from_json(values) for values in tensors]
        (message,) = self._broadcast(group, ["uint8"], [[message_size(changes)]])
        new = self._kept.apply(changes, message.cpu(), base, version)
        return {name: value.to(self.device) for name, value in new.items()}

    def _broadcast(self, name: str, dtypes: list[str], shapes: list[list[int]]) -> list[Tensor]:
        if name not in self._groups:
            raise ValueError(f"this worker has not joined the group {name!r}")
        return broadcast.receive(self._groups[name], dtypes, shapes, self.device, self._seconds[name])

    def _leave(self, name: str) -> None:
        self._seconds.pop(name, None)
        if group := self._groups.pop(name, None):
            broadcast.leave(group)


def read_folder(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of all safetensors files in a folder by name. They are mapped from the files and not read yet.

    Raises:
        ValueError: the folder has no such file, or two files have the same tensor.
    """
    from safetensors import safe_open

    weights: dict[str, Tensor] = {}
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"no safetensors file in {folder}")
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - it is no mapping
                if name in weights:
                    raise ValueError(f"{file} has a second tensor {name}")
                weights[name] = tensors.get_tensor(name)
    return weights
