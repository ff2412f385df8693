"""Cases of weight sync: the trainer's weights reach another process by files, by shared memory and by broadcast."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

import torch
from torch import Tensor

from mtrl.config.engine_schema import VllmConfig
from mtrl.distributed.gathered import layout_of
from mtrl.doctor.self_test.bench import Bench
from mtrl.doctor.self_test.outcome import CaseResult, judged
from mtrl.doctor.self_test.receiver import SECONDS, ReceiverProcess
from mtrl.doctor.self_test.workload import new_learner
from mtrl.engines.server.checksum import checksum
from mtrl.engines.server.export import FullWeights
from mtrl.engines.server.transports import make_sync
from mtrl.trainer.update.learner import alone

EVERY = 100
"""One of so many weights changes between the two versions of which the changes are sent."""


def by_file(bench: Bench) -> CaseResult:
    return asyncio.run(_sent(bench, "disk", "files", "cpu"))


def by_memory(bench: Bench) -> CaseResult:
    """CUDA IPC on a GPU, else shared memory."""
    how = ("CUDA IPC", "cuda:0") if bench.on_gpu else ("shared memory", "cpu")
    return asyncio.run(_sent(bench, "tensor", *how))


def by_broadcast(bench: Bench) -> CaseResult:
    """NCCL between two GPUs, else gloo; afterwards the changes of a few weights."""
    how = ("NCCL", "cuda:1") if bench.on_gpu else ("gloo", "cpu")
    return asyncio.run(_sent(bench, "distributed", *how))


async def _sent(bench: Bench, weight_sync: str, how: str, device: str) -> CaseResult:
    """Send the weights twice; the second time is measured, since groups and folders then exist."""
    dtype = "bfloat16" if bench.on_gpu else "float32"
    learner = new_learner(bench, bench.config(*([bench.half] if bench.on_gpu else [])))
    weights = alone(learner).weights()
    expected = checksum(dict(FullWeights(bench.model, dtype)(weights)))
    size = sum(value.numel() for value in layout_of(weights).values()) * getattr(torch, dtype).itemsize
    settings = VllmConfig(weight_sync=weight_sync, sync_timeout=SECONDS)
    sync = make_sync(settings, model=bench.model, dtype=dtype, lora_scaling=None)
    receiver = ReceiverProcess(device)
    changed = {}
    try:
        seconds = 0.0
        for version in (1, 2):
            start = time.perf_counter()
            await sync.send([receiver], weights, version)  # type: ignore[list-item]
            seconds = time.perf_counter() - start
        found = await receiver.received()
        await sync.close()
        problem = "" if found == expected else "the weights that arrived have another checksum"
        if weight_sync == "distributed" and not problem:
            problem, changed["changes_bytes"] = await _changes(bench, receiver, weights, dtype)
    finally:
        receiver.close()
    rate = size / seconds / 1e9
    evidence = f"{size / 1e6:,.0f} MB by {how} in {seconds:.2g} s: {rate:.2g} GB/s"
    return judged(
        problem, evidence, {"bytes": size, "seconds": seconds, "gb_per_second": rate, "transport": how, **changed}
    )


async def _changes(
    bench: Bench, receiver: ReceiverProcess, weights: Mapping[str, Tensor], dtype: str
) -> tuple[str, int]:
    """Send the weights, and then the changes to others. Return the problem, if any, and the bytes of the changes."""
    settings = VllmConfig(weight_sync="distributed", sync_delta=True, sync_timeout=SECONDS)
    sync = make_sync(settings, model=bench.model, dtype=dtype, lora_scaling=None)
    old = {name: weights[name].detach().clone() for name in weights}
    new = {name: value.clone() for name, value in old.items()}
    for value in new.values():
        value.view(-1)[::EVERY].neg_()
    for version, sent in ((3, old), (4, new)):
        await sync.send([receiver], sent, version)  # type: ignore[list-item]
    await sync.close()
    if await receiver.received() != checksum(dict(FullWeights(bench.model, dtype)(new))):
        return "the weights after the changes have another checksum", sync.sent_bytes
    whole = sum(value.numel() for value in new.values()) * getattr(torch, dtype).itemsize
    problem = f"{sync.sent_bytes:,} bytes of changes are not fewer than those of the weights"
    return "" if sync.sent_bytes < whole / 2 else problem, sync.sent_bytes
