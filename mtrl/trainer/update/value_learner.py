"""The optimiser steps of the value model on each rank."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor

from mtrl.algorithms.losses import weighted_sum
from mtrl.algorithms.registry import find_estimator
from mtrl.config.schema import Config
from mtrl.distributed.sharding import compute_device, reshard
from mtrl.distributed.world import all_sum
from mtrl.models.sequence_parallel import SequenceGroup
from mtrl.models.value_head import ValueModel
from mtrl.trainer.data.batching import MicroBatch
from mtrl.trainer.loading import load_peer, recompute
from mtrl.trainer.update.optimizer import Optimizer
from mtrl.trainer.update.policy import part_of
from mtrl.trainer.update.update_report import CriticReport, NonFiniteError
from mtrl.utils.heap import Heap

ValueBatch = tuple[MicroBatch, Tensor, Tensor]
"""A micro-batch, the values [N] before the step's first update, and the target values [N]."""


def value_model(config: Config, policy: Any) -> ValueModel | None:
    """Return the value model of a run, or None if `algorithm.advantage_method` needs none.

    Args:
        policy: module whose weights are copied, unless `algorithm.critic.path` names a folder.

    Raises:
        UserError: the folder cannot be used, or the architecture has no body to put a value head on.
    """
    if not find_estimator(config.algorithm.advantage_method).needs_critic:
        return None
    path = config.algorithm.critic.path
    return ValueModel(copy.deepcopy(policy) if path is None else _body(config, path, policy))


def _body(config: Config, path: str, policy: Any) -> Any:
    """Load the causal LM in a folder, with the settings of the policy's module."""
    model = load_peer(config, path, "algorithm.critic.path", policy, body_only=True)
    recompute(model, config)
    return model


class ValueLearner:
    """A value model and its optimiser on one rank, which trains on the micro-batches that it receives."""

    def __init__(self, config: Config, model: ValueModel, sequence_group: SequenceGroup | None = None):
        """Create the learner; `sequence_group` is that of the policy (`Policy.sequence_group`)."""
        self.model, self.settings, self.sequence_group = model, config.algorithm.critic, sequence_group
        self.optimizer = Optimizer(model, self.settings.optimizer, config.trainer.max_steps)
        self._heap = Heap(sum(p.numel() for p in model.parameters()))

    @property
    def device(self) -> torch.device:
        """Device for the inputs."""
        return compute_device(self.model)

    @torch.no_grad()
    def values(self, batches: list[MicroBatch]) -> list[Tensor]:
        """Return the value before each sampled token, [N] for each micro-batch, on the CPU."""
        found = [self._forward(batch.to(self.device)).cpu() for batch in batches]
        reshard(self.model)
        return found

    def update(self, parts: list[list[ValueBatch]], step: int) -> CriticReport:
        """Make the optimiser steps of training step `step` (0-based), one for each of `parts`."""
        report = CriticReport()
        try:
            for part in parts:
                self._optimiser_step(part, step, report)
        except NonFiniteError as error:
            report.stopped = error
        return report

    def _forward(self, batch: MicroBatch) -> Tensor:
        part = part_of(batch, self.model, self.sequence_group)
        return part.join(self.model(part.mask, **part.inputs))

    def _optimiser_step(self, part: list[ValueBatch], step: int, report: CriticReport) -> None:
        total = 0.0
        for on_cpu, old, wanted in part:
            batch = on_cpu.to(self.device)
            self._heap.trim()
            values = self._forward(batch)
            losses, clipped = value_losses(values, old.to(values), wanted.to(values), self.settings.value_clip)
            loss = weighted_sum(losses, batch.weights)
            total += loss.item()
            self._heap.trim()
            loss.backward()
            report.clipped += weighted_sum(clipped, batch.weights).item()
        if not math.isfinite(everywhere := all_sum(total, self.device)):
            raise NonFiniteError("loss", everywhere)
        norm, report.lr = self.optimizer.step(step)
        self._heap.trim()
        if not math.isfinite(norm):
            raise NonFiniteError("gradient norm", norm)
        report.updates += 1
        report.loss += total
        report.grad_norm += norm


def value_losses(values: Tensor, old: Tensor, targets: Tensor, clip: float | None) -> tuple[Tensor, Tensor]:
    """Return ½ max((v - R)², (v' - R)²), v' = v clipped to old ± `clip`, [N]; and a tensor [N] that is 1 where the clip
    made the loss larger.

    A value that has moved more than `clip` towards its target gets no gradient, like a ratio in PPO's loss (OpenAI
    baselines; Engstrom et al., 2005.12729). With `clip` None the loss is ½ (v - R)².
    """
    free = (values - targets).square()
    near = values if clip is None else values.clamp(old - clip, old + clip)
    bounded = (near - targets).square()
    return 0.5 * torch.maximum(free, bounded), (bounded > free).to(free.dtype)
