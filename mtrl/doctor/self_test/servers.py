"""Cases of vLLM and SGLang: a server samples, receives new weights and, on a GPU, sleeps during the update."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from mtrl.config.schema import Config
from mtrl.distributed.world import World
from mtrl.doctor.self_test.bench import Bench
from mtrl.doctor.self_test.outcome import FIX, CaseResult
from mtrl.doctor.self_test.process import SERVER_LOGS
from mtrl.doctor.self_test.rollouts import sample_before_and_after_update
from mtrl.doctor.self_test.workload import GIB, new_learner
from mtrl.engines.server.engine import ServerEngine
from mtrl.preflight.result import failed, passed
from mtrl.trainer.setup.servers import server_engine
from mtrl.trainer.update.learner import Learner

SHARE = 0.4
"""`generator.gpu_memory_utilization` of servers that share the trainer's GPU."""
LEAST_FREED = 0.5
"""Share of the server's memory that sleep must free at least."""


def vllm(bench: Bench) -> CaseResult:
    return _awake(bench, "vllm")


def vllm_sleep(bench: Bench) -> CaseResult:
    return _asleep(bench, "vllm")


def sglang(bench: Bench) -> CaseResult:
    return _awake(bench, "sglang")


def sglang_sleep(bench: Bench) -> CaseResult:
    return _asleep(bench, "sglang")


def _awake(bench: Bench, name: str) -> CaseResult:
    """Sample on a server that has a GPU of its own if there are two."""
    config, learner, engine = _start(bench, name, colocate=bench.gpus == 1)
    return asyncio.run(sample_before_and_after_update(bench, config, learner, engine, True))


def _asleep(bench: Bench, name: str) -> CaseResult:
    """Sample on a server that shares the trainer's GPU and sleeps during the update."""
    config, learner, engine = _start(bench, name, colocate=True)
    sleep = Sleep(config, learner, engine)
    outcome = asyncio.run(sample_before_and_after_update(bench, config, learner, engine, True, sleep.update))
    return sleep.judged(outcome)


def _start(bench: Bench, name: str, colocate: bool) -> tuple[Config, Learner, ServerEngine]:
    config = bench.config(*server_overrides(bench, name, colocate))
    learner = new_learner(bench, config)
    model_config, logs = learner.policy.model.config, Path(bench.scratch) / SERVER_LOGS
    engine = server_engine(config, World(), bench.model, model_config, bench.sizes.context, logs)
    return config, learner, engine


def server_overrides(bench: Bench, name: str, colocate: bool) -> list[str]:
    """Return the overrides for one server of an engine, which shares the trainer's GPU or has one of its own."""
    sync = "disk" if not bench.on_gpu else "tensor" if colocate else "distributed"
    return [
        *([bench.half] if bench.on_gpu else []),
        f"generator={name}",
        f"generator.{name}.colocate={str(colocate).lower()}",
        f"generator.{name}.weight_sync={sync}",
        f"generator.gpu_memory_utilization={SHARE if colocate else 0.8}",
    ]


class Sleep:
    """The sleep of colocated servers during an update, with the GPU memory that it frees."""

    def __init__(self, config: Config, learner: Learner, engine: ServerEngine):
        self._learner, self._engine = learner, engine
        self._share = int(config.generator.gpu_memory_utilization * torch.cuda.mem_get_info()[1])
        self.freed = 0
        """GPU memory that the sleep freed, in bytes."""

    async def update(self, train: Callable[[], Any]) -> None:
        """Make the update while the servers sleep."""
        self._learner.release()
        awake = torch.cuda.mem_get_info()[0]
        await self._engine.sleep()
        self.freed = torch.cuda.mem_get_info()[0] - awake
        train()
        self._learner.release()
        await self._engine.wake()

    def judged(self, outcome: CaseResult) -> CaseResult:
        """Return the outcome of the sampling, with the freed memory."""
        figures = {**outcome.figures, "freed_bytes": self.freed, "server_bytes": self._share}
        evidence = f"sleep frees {self.freed / GIB:.1f} of {self._share / GIB:.1f} GiB; {outcome.result.evidence}"
        if not outcome.passed:
            return CaseResult(failed(evidence, outcome.result.fix), figures)
        if self.freed < LEAST_FREED * self._share:
            return CaseResult(failed(f"the server keeps its memory: {evidence}", FIX), figures)
        return CaseResult(passed(evidence), figures)
