"""Cases of weight sync: the trainer's weights reach another process by files, by shared memory and by broadcast."""

from __future__ import annotations

import asyncio
import time

import torch

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


def by_file(bench: Bench) -> CaseResult:
    return asyncio.run(_sent(bench, "disk", "files", "cpu"))


def by_memory(bench: Bench) -> CaseResult:
    """CUDA IPC on a GPU, else shared memory."""
    how = ("CUDA IPC", "cuda:0") if bench.on_gpu else ("shared memory", "cpu")
    return asyncio.run(_sent(bench, "tensor", *how))


def by_broadcast(bench: Bench) -> CaseResult:
    """NCCL between two GPUs, else gloo."""
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
    try:
        seconds = 0.0
        for version in (1, 2):
            start = time.perf_counter()
            await sync.send([receiver], weights, version)  # type: ignore[list-item]
            seconds = time.perf_counter() - start
        found = await receiver.received()
        await sync.close()
    finally:
        receiver.close()
    rate = size / seconds / 1e9
    problem = "" if found == expected else "the weights that arrived have another checksum"
    evidence = f"{size / 1e6:,.0f} MB by {how} in {seconds:.2g} s: {rate:.2g} GB/s"
    return judged(problem, evidence, {"bytes": size, "seconds": seconds, "gb_per_second": rate, "transport": how})
