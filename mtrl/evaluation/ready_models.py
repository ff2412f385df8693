"""A model that is ready to run episodes: local weights, or an endpoint."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mtrl.config.derived import is_deterministic, sequences
from mtrl.config.schema import Config
from mtrl.engines.base import Engine, SamplingParams
from mtrl.engines.endpoints.budget import Budget
from mtrl.engines.endpoints.chat_client import Address
from mtrl.engines.endpoints.engine import EndpointEngine
from mtrl.environments.factory import Task
from mtrl.environments.pool import EnvironmentPool
from mtrl.evaluation.rollouts import Source
from mtrl.rollout.episode import BaseLoop, EpisodeLoop
from mtrl.types import Row, StopReason, Trajectory
from mtrl.utils.process import usable_cores


@dataclass
class Throttle(EpisodeLoop):
    """Episode loop that limits the number of concurrent episodes. Waiting for a slot does not count towards the time
    limit of an episode."""

    slots: asyncio.Semaphore = field(kw_only=True)

    async def run(self, row: Row, group_id: str, index: int, sampling: SamplingParams) -> Trajectory:
        """Run an episode. If the engine has a `refused` error, every turn would fail, so the episode fails without
        creating an environment."""
        async with self.slots:
            if (refused := getattr(self.engine, "refused", None)) is not None:
                return Trajectory(
                    str(row["id"]),
                    group_id,
                    index,
                    stop_reason=StopReason.ENV_ERROR,
                    trainable=False,
                    error=f"{type(refused).__name__}: {refused}",
                )
            return await super().run(row, group_id, index, sampling)


@dataclass
class ReadyModel:
    """One model and the resources that its episodes share."""

    source: Source
    loop: BaseLoop[Any]
    sampling: SamplingParams
    """Sampling parameters of evaluations."""
    tokenizer: Any = None
    """Tokenizer; None for a model behind an endpoint."""
    resources: ExitStack = field(default_factory=ExitStack)
    """Resources that are released when the model is closed."""

    @property
    def engine(self) -> Engine:
        return self.loop.engine

    @property
    def refused(self) -> Exception | None:
        """Error because of which no further episode can succeed; None if there is none."""
        return getattr(self.engine, "refused", None)

    async def close(self) -> None:
        with self.resources:
            await self.loop.close()
            await self.engine.close()


def local_model(source: Source, config: Config, task: Task, rows: Sequence[Row]) -> ReadyModel:
    """Load the weights into this process, in the dtype in which the engine samples during training.

    Raises:
        UserError: The weights cannot be loaded, or a row does not fit.
    """
    import torch

    from mtrl.evaluation.weights import load
    from mtrl.trainer.loading import cast_parameters, compute_dtype
    from mtrl.trainer.setup.connect import connect
    from mtrl.trainer.setup.engine import shared_engine
    from mtrl.trainer.setup.models import SMALL_MODEL

    gc.collect()  # frees the memory of the previous model
    model, tokenizer = load(source, config)
    model = cast_parameters(model, compute_dtype(config))
    parameters = sum(p.numel() for p in model.parameters())
    torch.set_num_threads(config.trainer.threads or (1 if parameters <= SMALL_MODEL else usable_cores()))
    player = connect(config, task, model.config, tokenizer, rows, partial(shared_engine, config, model, tokenizer))
    player.engine.version = source.step
    return ReadyModel(source, player.loop, player.eval_sampling, tokenizer)


def served_model(source: Source, config: Config, task: Task, rows: Sequence[Row], logs: Path) -> ReadyModel:
    """Start servers of `generator.backend` with the weights.

    Args:
        logs: Folder of the servers' output.

    Raises:
        UserError: The weights cannot be loaded, or a row does not fit.
    """
    from mtrl.distributed.world import World
    from mtrl.evaluation.weights import load
    from mtrl.models.gguf import as_folder
    from mtrl.models.tiny import save
    from mtrl.trainer.loading import load_shape
    from mtrl.trainer.setup.connect import connect
    from mtrl.trainer.setup.servers import server_engine

    config = without_trainer(config)
    with ExitStack() as stack:
        path, key = str(source.path), "model.path" if source.kind == "base" else "evaluation.model"
        if source.kind == "checkpoint":  # a server cannot read the format of checkpoints
            path = str(Path(stack.enter_context(TemporaryDirectory(prefix="mtrl-"))) / "model")
            save(*load(source, config), Path(path))
        path = as_folder(path, key)
        shape, tokenizer = load_shape(config, path, key)

        def start(context: int) -> Engine:
            """Start the engine in a thread, because starting servers needs an event loop of its own."""
            with ThreadPoolExecutor(1) as thread:
                return thread.submit(server_engine, config, World(), path, shape, context, logs).result()

        player = connect(config, task, shape, tokenizer, rows, start)
        player.engine.version = source.step
        return ReadyModel(source, player.loop, player.eval_sampling, tokenizer, stack.pop_all())


def without_trainer(config: Config) -> Config:
    """Return the configuration with all GPUs and their memory for the servers, because no trainer runs."""
    generator, name = config.generator, config.generator.backend
    generator = replace(generator, **{name: replace(getattr(generator, name), colocate=False)})
    return replace(config, model=replace(config.model, device="cpu"), generator=generator)


def batch_size_of(source: Source, config: Config) -> int | None:
    """Return the number of trajectories per fixed batch, which no other trajectory joins; None: batches are not fixed.

    The deterministic engine needs fixed batches, because the last bits of log-probs depend on the composition of the
    batch. A resumed evaluation must give each trajectory the same batch as an uninterrupted one.
    """
    together = source.kind != "endpoint" and is_deterministic(config)
    return sequences(config) if together else None


def endpoint_model(source: Source, config: Config, task: Task, budget: Budget) -> ReadyModel:
    """Connect to an endpoint. No request is made before the first episode.

    Raises:
        UserError: See `EndpointEngine`.
    """
    from mtrl.rollout.chat import ChatConversation
    from mtrl.trainer.setup.connect import eval_sampling_params, limits, limits_of_sources

    assert source.model is not None and source.url is not None
    at_once, context = config.evaluation.endpoint.max_concurrent, config.generator.max_context_length or sys.maxsize
    loop = Throttle(
        EndpointEngine(Address(source.model, source.url), config.evaluation.endpoint, budget, source.label),
        task.make_environment,
        ChatConversation,
        EnvironmentPool(config.environment.max_workers),
        limits(config, context),
        slots=asyncio.Semaphore(at_once),
    )
    loop.limits_of_sources = limits_of_sources(config, context)
    return ReadyModel(source, loop, eval_sampling_params(config))
