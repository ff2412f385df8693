"""The steps of a weight sync to one server, for each way of sending weights."""

import asyncio
import base64
import io
import tempfile
from contextlib import asynccontextmanager
from itertools import count
from multiprocessing.reduction import ForkingPickler

import torch
from safetensors.torch import save_file

from mtrl.distributed import broadcast
from mtrl.engines.server.changes import find_changes, message_of
from mtrl.engines.server.checksum import checksum as checksum_of
from mtrl.engines.server.server_api import Rendezvous, TensorLayout

_groups = count()


async def update(api, send, weights, version, mode="continue", checksum=None):
    """Pause, send, drop the cache, resume."""
    await api.pause(mode)
    try:
        await api.begin_update()
        await send(api, weights, version, checksum)
        await api.end_update(version)
        await api.drop_cache()
    finally:
        await api.resume()


async def by_folder(api, weights, version, checksum=None):
    with tempfile.TemporaryDirectory() as folder:
        half = len(weights) // 2
        for number, part in enumerate((list(weights.items())[:half], list(weights.items())[half:])):
            save_file(dict(part), f"{folder}/model-{number}.safetensors")
        await api.receive_folder(folder, version, checksum or checksum_of(weights))


async def by_tensors(api, weights, version, checksum=None):
    await api.receive_tensors([payload_of(weights)], version, checksum or checksum_of(weights))


def payload_of(weights) -> str:
    """Copy the weights into shared memory, and return the payload for one worker."""
    torch.multiprocessing.set_sharing_strategy("file_system")
    shared = [(name, value.clone().share_memory_()) for name, value in weights.items()]
    buffer = io.BytesIO()
    ForkingPickler(buffer).dump(shared)
    return base64.b64encode(buffer.getvalue()).decode()


@asynccontextmanager
async def broadcast_group(api, seconds=20.0):
    """Join the trainer and the worker of this server in a group, and yield the group and its name."""
    store, name = broadcast.open_store("127.0.0.1", seconds), f"weights-{next(_groups)}"
    joining = asyncio.create_task(api.join(Rendezvous("127.0.0.1", store.port, 2, 1, "gloo", name)))
    meeting = ("gloo", "127.0.0.1", store.port, 2, 0, name, seconds, store)
    group = await asyncio.to_thread(broadcast.join_group, *meeting)
    await joining
    try:
        yield group, name
    finally:
        await api.leave(name)
        broadcast.leave(group)


async def by_broadcast(api, weights, version, checksum=None):
    async with broadcast_group(api) as (group, name):
        items = list(weights.items())
        for part in (dict(items[:5]), dict(items[5:])):  # the first ends in the middle of a layer
            layouts = [TensorLayout(key, str(value.dtype)[6:], tuple(value.shape)) for key, value in part.items()]
            receiving = asyncio.create_task(api.receive_broadcast(layouts, name, version, checksum_of(part)))
            await asyncio.to_thread(broadcast.broadcast, group, list(part.values()), 20.0)
            await receiving


async def by_changes(api, weights, version, checksum=None):
    """Send whole tensors in the form of changes."""
    async with broadcast_group(api) as (group, name):
        found = [find_changes(key, value, None) for key, value in weights.items()]
        message = message_of([piece for _, pieces in found for piece in pieces], "cpu")
        layouts, digest = [layout for layout, _ in found], checksum or checksum_of(weights)
        receiving = asyncio.create_task(api.receive_changes(layouts, name, None, version, digest))
        await asyncio.to_thread(broadcast.broadcast, group, [message], 20.0)
        await receiving


WAYS = {"folder": by_folder, "broadcast": by_broadcast, "tensors": by_tensors, "changes": by_changes}
