"""The learners: `Learner` trains one rank's share of the models, and `Learners` calls those of all ranks.

The path of an optimiser step: `Updater` plans it, `Learners` distributes its micro-batches, `RankGroup` calls `Learner`
on every rank, and `Learner` computes loss and gradients by its `Policy`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from mtrl.algorithms.batch import Floats
from mtrl.algorithms.corrections import Reweighting
from mtrl.algorithms.distillation import TeacherScores, top_k_loss
from mtrl.algorithms.kl import k3
from mtrl.algorithms.losses import TokenBatch, weighted_sum
from mtrl.algorithms.mismatch import measure
from mtrl.algorithms.registry import find_correction, find_kl, find_loss
from mtrl.config.derived import COPY_BUCKET, WEIGHT_BUCKET, ranks_per_batch
from mtrl.config.schema import Config
from mtrl.distributed.gathered import GatheredWeights
from mtrl.distributed.rank_group import RankGroup
from mtrl.distributed.sharding import named_tensors
from mtrl.distributed.world import World, all_sum
from mtrl.errors import UserError
from mtrl.models.attention import OWN, attention_of
from mtrl.models.experts import Routing, balance_loss, expert_tokens, recorded, routers_of
from mtrl.trainer.checkpoint.saver import Saver
from mtrl.trainer.checkpoint.tensors import load_tensors, tensor_names
from mtrl.trainer.data.batching import PACKED, PADDED, SHARED, MicroBatch, RowLayout, balance, micro_batches
from mtrl.trainer.flops import ModelFlops, model_flops
from mtrl.trainer.update.optimizer import Optimizer
from mtrl.trainer.update.policy import Policy
from mtrl.trainer.update.update_report import CriticReport, NonFiniteError, UpdateReport
from mtrl.trainer.update.value_learner import ValueBatch, ValueLearner
from mtrl.trainer.work_thread import like_this_thread
from mtrl.types import Sample, TopTokens
from mtrl.utils.heap import Heap

log = logging.getLogger(__name__)

CRITIC = "critic."
"""Prefix of the names of the critic's tensors in a checkpoint."""


class Frozen(Protocol):
    """The reference of the KL, which is not trained."""

    def all_logprobs(self, batches: list[MicroBatch]) -> list[Tensor]:
        """Return the log-probs [N] of each micro-batch, without gradients."""


class Learner:
    """A rank's share of the policy with its reference, teacher and optimiser, and of the critic if there is one.

    Every method is called on all ranks at the same time, with work for each rank, since a sharded model needs all ranks
    at every layer. `Learners` also calls methods of `policy`, `critic` and `saver` in this way.
    """

    def __init__(
        self,
        config: Config,
        policy: Policy,
        reference: Frozen | None,
        optimizer: Optimizer,
        critic: ValueLearner | None = None,
        saver: Saver | None = None,
        teacher: Policy | None = None,
    ):
        self.algorithm, self.distillation = config.algorithm, config.distillation
        self.ranks_per_batch = ranks_per_batch(config.trainer)
        """Number of ranks that share each micro-batch."""
        self.policy, self.reference, self.optimizer = policy, reference, optimizer
        self.critic, self.saver, self.teacher = critic, saver or Saver(), teacher
        frozen = [getattr(model, "model", None) for model in (reference, teacher)]
        models = [policy.model, *frozen, critic and critic.model]
        self.layout = layout_of(config, [model for model in models if model is not None])
        """Layout of micro-batches that all models of this learner can train on."""
        self._routers = routers_of(policy.model) if policy.sequence_group is None else []
        self._heap = Heap(policy.parameters)
        if config.algorithm.expert_balance_coef and not self._routers:
            log.warning(
                "algorithm.expert_balance_coef=%g has no effect, since Transformers names no routers in this model",
                config.algorithm.expert_balance_coef,
            )
        if config.algorithm.router_replay and policy.router_replay is None:
            log.warning("algorithm.router_replay=true has no effect, since Transformers names no routers in this model")
        self._loss = find_loss(config.algorithm.loss_fn)
        self._correction = find_correction(config.algorithm.off_policy_correction)
        self._kl = find_kl(config.algorithm.kl_estimator)

    @property
    def flops(self) -> ModelFlops:
        """FLOPs of the policy."""
        return model_flops(self.policy.model)

    def update(self, parts: list[list[MicroBatch]], step: int, kl_coefficient: float) -> UpdateReport:
        """Make the optimiser steps of training step `step` (0-based), one for each of `parts`."""
        report = UpdateReport()
        try:
            for part, anchors in zip(parts, [self._anchors(part) for part in parts], strict=True):
                self._optimiser_step(part, anchors, step, kl_coefficient, report)
        except NonFiniteError as error:
            report.stopped = error
        return report

    def reference_logprobs(self, batches: list[MicroBatch]) -> list[Tensor]:
        """Return the reference's log-probs, [N] for each micro-batch, on the CPU."""
        assert self.reference is not None
        return [self.reference.all_logprobs([batch.to(self.policy.device)])[0].cpu() for batch in batches]

    def teacher_scores(self, batches: list[MicroBatch], k: int) -> list[tuple[Tensor, ...]]:
        """Return, for each micro-batch, the teacher's log-probs [N], and ids and log-probs [N, k] of its most probable
        tokens, on the CPU."""
        assert self.teacher is not None
        found = [self.teacher.top_logprobs(batch.to(self.policy.device), k) for batch in batches]
        return [tuple(tensor.cpu() for tensor in tensors) for tensors in found]

    def logprobs(self, batches: list[MicroBatch]) -> list[Tensor]:
        """Return the log-probs under the policy's current weights, [N] for each micro-batch, on the CPU."""
        return [self._policy_logprobs(batch.to(self.policy.device)).cpu() for batch in batches]

    def _policy_logprobs(self, batch: MicroBatch) -> Tensor:
        with self.policy.replaying(batch):
            return self.policy.all_logprobs([batch])[0]

    def release(self) -> None:
        """Free cached GPU memory for the servers that share the device."""
        torch.cuda.empty_cache()

    def save(self, folder: Path) -> None:
        """Write the current values of this rank's shards of all weights and moments (`Saver.save`)."""
        self.saver.save(self.state(), folder)

    def load(self, folder: Path) -> None:
        """Load the tensors of a checkpoint, which any number of ranks may have written.

        Raises:
            UserError: the tensors do not fit the model and the settings.
        """
        names = tensor_names(folder)
        if self.critic and not any(name.startswith(CRITIC) for name in names):
            raise UserError(
                f"checkpoint {folder} has no critic, and algorithm.advantage_method needs one; resume with the method "
                "that it was written with, or start anew with resume=none"
            )
        into = self._weights()
        for prefix, optimizer in self._optimizers().items():
            mine = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
            into |= {prefix + name: value for name, value in optimizer.allocate(mine).items()}
        load_tensors(into, folder)

    def state(self) -> dict[str, Tensor]:
        """Return all weights and moments by their names in a checkpoint, without copies."""
        moments = {
            prefix + name: value
            for prefix, optimizer in self._optimizers().items()
            for name, value in optimizer.state().items()
        }
        return self._weights() | moments

    def _weights(self) -> dict[str, Tensor]:
        """Return all weights by name, without copies. For a policy with adapters these are only the adapters, since the
        other weights never change."""
        own = named_tensors(self.policy.model, trainable_only=self.policy.adapted)
        found = {f"model.{name}": value for name, value in own.items()}
        if self.critic:
            found |= {f"{CRITIC}model.{name}": value for name, value in named_tensors(self.critic.model).items()}
        return found

    def _optimizers(self) -> dict[str, Optimizer]:
        """Return the optimisers by the prefix of the names of their tensors."""
        critics = {f"{CRITIC}optimizer.": self.critic.optimizer} if self.critic else {}
        return {"optimizer.": self.optimizer, **critics}

    def _anchors(self, batches: list[MicroBatch]) -> list[Tensor]:
        """Return the log-probs of the old policy, by `algorithm.loss_anchor`: the engine's, or the trainer's before the
        first optimiser step."""
        if self.algorithm.loss_anchor == "old":
            return [self._policy_logprobs(batch.to(self.policy.device)) for batch in batches]
        return [batch.rollout_logprobs.to(self.policy.device) for batch in batches]

    def _optimiser_step(
        self,
        batches: list[MicroBatch],
        anchors: list[Tensor],
        step: int,
        kl_coefficient: float,
        report: UpdateReport,
    ) -> None:
        total = 0.0
        for batch, anchor in zip(batches, anchors, strict=True):
            here = batch.to(self.policy.device)
            self._heap.trim()  # the backward pass before this one has left free memory between tensors
            reference = self._reference(here)  # which chooses its experts by itself
            with self.policy.replaying(here):  # the backward pass may compute activations again
                loss = self._loss_of(here, anchor, reference, step, kl_coefficient, report)
                total += loss.item()
                self._heap.trim()  # here the memory in use is largest
                loss.backward()
        if not math.isfinite(everywhere := all_sum(total, self.policy.device)):
            raise NonFiniteError("loss", everywhere)
        norm, report.lr = self.optimizer.step(step)
        self._heap.trim()
        if not math.isfinite(norm):
            raise NonFiniteError("gradient norm", norm)
        report.updates += 1
        report.loss += total
        report.grad_norm += norm

    def _loss_of(
        self,
        batch: MicroBatch,
        anchor: Tensor,
        reference: Tensor | None,
        step: int,
        kl_coefficient: float,
        report: UpdateReport,
    ) -> Tensor:
        """Return this micro-batch's part of the loss of the whole optimiser step; it is 0 for a filler."""
        with recorded(self._routers) as routing:
            logprobs, entropy, top = self.policy.logprobs_beside(batch)
        tokens = TokenBatch(logprobs, anchor, batch.advantages, batch.rollout_logprobs, batch.trajectory)
        losses, metrics = self._loss(tokens, self.algorithm)
        if batch.is_filler:
            return weighted_sum(logprobs, batch.weights)
        if not report.updates:
            fresh = batch.versions == step
            report.drift += measure(logprobs, batch.rollout_logprobs, fresh, batch.trajectory)
            report.shift += measure(logprobs, batch.rollout_logprobs, ~fresh)
            report.first_logprobs.append(logprobs.detach().cpu())
        if self._correction.name != "none":
            weights = self._corrections(tokens)
            report.reweighting += Reweighting.of(weights)
            losses = losses * weights
        if reference is not None:
            sampled = batch.rollout_logprobs  # also with `loss_anchor=old`: ratios correct for the policy that sampled
            losses = losses + kl_coefficient * self._kl(logprobs, reference, sampled)
            # The metric is k3 for every estimator of the loss: its expected value is the KL, and it is never negative.
            report.token_sums["kl"] += k3(logprobs.detach(), reference, sampled).sum().item()
        if batch.teacher_ids.shape[1]:
            distilled = top_k_loss(top, batch.teacher_logprobs)
            losses = losses + self.distillation.weight * distilled
            report.token_sums["top_k_kl"] += distilled.detach().sum().item()
            report.token_sums["top_k_mass"] += top.detach().exp().sum().item()
        if self.algorithm.entropy_coef:
            losses = losses - self.algorithm.entropy_coef * entropy
        report.trained_tokens += len(logprobs)
        if self.policy.router_replay is not None:
            report.token_sums["experts/replayed"] += replayed_tokens(batch)
        report.token_sums["entropy"] += entropy.detach().sum().item()
        report.token_sums["clip_frac"] += metrics["clipped"].sum().item() if "clipped" in metrics else 0.0
        return weighted_sum(losses, batch.weights) + self._balance_of(batch, routing, report)

    def _balance_of(self, batch: MicroBatch, routing: Routing, report: UpdateReport) -> Tensor | float:
        """Return the weighted loss that balances experts, with this micro-batch's share of the sampled tokens of the
        optimiser step, which no `loss_reduction` changes; and count the tokens of each expert."""
        if not routing:
            return 0.0
        sampled = batch.action_mask.flatten()
        report.count_experts(expert_tokens(routing, sampled))
        coefficient, share = self.algorithm.expert_balance_coef, len(batch.weights) / batch.tokens_of_step
        return coefficient * share * balance_loss(routing, sampled) if coefficient else 0.0

    def _reference(self, batch: MicroBatch) -> Tensor | None:
        if self.reference is None or not self.algorithm.kl_loss_coef:
            return None
        return self.reference.all_logprobs([batch])[0]

    def _corrections(self, tokens: TokenBatch) -> Tensor:
        """Return the correction's weights on the loss, [N]."""
        trainer = tokens.old_logprobs if self.algorithm.loss_anchor == "old" else tokens.logprobs.detach()
        return self._correction(trainer - tokens.behaviour, tokens, self.algorithm)


def replayed_tokens(batch: MicroBatch) -> int:
    """Return the number of sampled tokens for whose predictions the experts of the token before are known."""
    return 0 if batch.experts is None else int((batch.experts[batch.action_mask][:, 0, 0] >= 0).sum())


def layout_of(config: Config, models: Sequence[Any]) -> RowLayout:
    """Return the layout for `trainer.packing`, null being true for pretrained models with mtrl's own attention. With
    this attention packs share prefixes."""
    packing = config.trainer.packing
    own = all(attention_of(model) == OWN for model in models)
    if packing or (packing is None and own and config.model.name != "tiny"):
        return SHARED if own else PACKED
    return PADDED


Assignments = list[list[list[MicroBatch]]]
"""Micro-batches by optimiser step and batch group."""


class Learners:
    """The learners of all ranks, for the leader: it distributes micro-batches to them, and returns results in order.
    With one process it only calls that process's learner.

    Micro-batches are divided among batch groups: the ranks that share each micro-batch, one by default. All ranks of a
    batch group get the same micro-batches and have the same results.
    """

    def __init__(self, rank_group: RankGroup, model: ModelFlops, layout: RowLayout = PADDED, ranks_per_batch: int = 1):
        """Create the learners; `ranks_per_batch` is the number of ranks of a batch group."""
        self.rank_group, self.model, self.layout = rank_group, model, layout
        self.ranks_per_batch = ranks_per_batch
        self.data_parallel = rank_group.world.size // ranks_per_batch
        """Number of batch groups."""

    def reference_logprobs(self, samples: Sequence[Sample], max_tokens: int) -> list[Floats]:
        """Return the reference's log-prob of each sampled token, one array per sample. `max_tokens` is the maximum
        number of tokens of a micro-batch, padding included."""
        return self._per_sample("reference_logprobs", samples, max_tokens)

    def teacher_scores(self, samples: Sequence[Sample], k: int, max_tokens: int) -> list[TeacherScores]:
        """Return what the teacher says about each sample, with its k most probable tokens."""
        batches = self._unweighted(samples, max_tokens)
        found = self._forward("teacher_scores", batches, k)
        logprobs, ids, top = (by_sample(batches, [tensors[part] for tensors in found]) for part in range(3))
        return [
            TeacherScores(logprobs[row].double().numpy(), TopTokens(ids[row].numpy(), top[row].double().numpy()))
            for row in range(len(samples))
        ]

    def values(self, samples: Sequence[Sample], max_tokens: int) -> list[Floats]:
        """Like `reference_logprobs`, with the critic's value before each sampled token."""
        return self._per_sample("critic.values", samples, max_tokens)

    def logprobs(self, batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Return the policy's log-probs, [N] for each micro-batch, on the CPU."""
        return self._forward("logprobs", batches)

    def update(
        self, parts: Sequence[Sequence[MicroBatch]], step: int, kl_coefficient: float
    ) -> tuple[Assignments, list[UpdateReport]]:
        """Make one optimiser step of the policy for each part, until a loss or a gradient is not finite. Return the
        micro-batches of each batch group, and the reports by batch group."""
        assignments = [self._balance(part) for part in parts]
        return assignments, self._run("update", self._shares(assignments), step, kl_coefficient)

    def update_critic(self, parts: Sequence[Sequence[ValueBatch]], step: int) -> CriticReport:
        """Make one optimiser step of the critic for each part, until a loss or a gradient is not finite."""
        assignments = []
        for part in parts:
            values_of = {id(batch.token_ids): (old, wanted) for batch, old, wanted in part}
            balanced = self._balance([batch for batch, _, _ in part])
            assignments.append(
                [[(batch, *values_of[id(batch.token_ids)]) for batch in batches] for batches in balanced]
            )
        return CriticReport.joined(self._run("critic.update", self._shares(assignments), step))

    def weights(self) -> Mapping[str, Tensor]:
        """Return the weights for an engine with its own copy. They are gathered bucket by bucket while the engine reads
        them, in any thread, and must not change meanwhile; adapters, which are small, are gathered here."""
        policy = self.rank_group.worker.policy
        if policy.adapted:
            return self.rank_group.run("policy.weights")[0]
        prepare_thread = like_this_thread()

        def gather(names: Sequence[str]) -> dict[str, Tensor]:
            prepare_thread()
            return self.rank_group.run("policy.weights", None, names)[0]

        limit = WEIGHT_BUCKET if self.rank_group.world.size > 1 else COPY_BUCKET
        return GatheredWeights(policy.layout(), gather, limit)

    def release(self) -> None:
        """Free cached GPU memory of all ranks for the servers that share the GPUs."""
        self.rank_group.run("release")

    def export(self, folder: Path) -> None:
        """Write the policy as a Hugging Face folder."""
        self.rank_group.run("policy.export", None, folder)

    def save(self, folder: Path, commit: Callable[[], object]) -> None:
        """Write the tensors of all ranks into `folder`; `commit` is called once they are written.

        Raises:
            UserError: this checkpoint, or the one before, could not be written.
        """
        self.rank_group.run("save", None, folder)
        self.rank_group.worker.saver.finish(commit)

    @property
    def is_saving(self) -> bool:
        """Whether the leader is still writing a checkpoint; other ranks may still write after it has finished."""
        return self.rank_group.worker.saver.is_busy

    def wait_saved(self) -> None:
        """Return when the last checkpoint is on the disk.

        Raises:
            UserError: the checkpoint could not be written.
        """
        self.rank_group.run("saver.wait")

    def load(self, folder: Path) -> None:
        """Load the tensors of a checkpoint on every rank.

        Raises:
            UserError: the tensors do not fit the model and the settings.
        """
        self.rank_group.run("load", None, folder)

    def _balance(self, batches: Sequence[MicroBatch]) -> list[list[MicroBatch]]:
        return balance(batches, self.data_parallel, self.model)

    def _run(self, method: str, shares: Sequence[tuple], *common: Any) -> list[Any]:
        """Call a method of each rank with the share of its batch group, and return the result of the first rank of
        each group."""
        found = self.rank_group.run(method, [s for s in shares for _ in range(self.ranks_per_batch)], *common)
        return found[:: self.ranks_per_batch]

    def _per_sample(self, method: str, samples: Sequence[Sample], max_tokens: int) -> list[Floats]:
        """Return the result of a pass without gradients: for each sample, one number per sampled token."""
        batches = self._unweighted(samples, max_tokens)
        found = by_sample(batches, self._forward(method, batches))
        return [found[row].double().numpy() for row in range(len(samples))]

    def _unweighted(self, samples: Sequence[Sample], max_tokens: int) -> list[MicroBatch]:
        weights = [np.zeros(len(sample.token_ids)) for sample in samples]
        return micro_batches(samples, weights, max_tokens, layout=self.layout, ranks=self.data_parallel)

    def _forward(self, method: str, batches: Sequence[MicroBatch], *settings: Any) -> list[Any]:
        """Return the result of `method` for each micro-batch. `settings` are its other arguments on every rank."""
        assignments = self._balance(batches)
        results = self._run(method, [(self._sent(own),) for own in assignments], *settings)
        found = {
            id(batch): values
            for batches_of_group, own in zip(assignments, results, strict=True)
            for batch, values in zip(batches_of_group, own, strict=True)
        }
        return [found[id(batch)] for batch in batches]

    def _shares(self, parts: Sequence[Sequence[Sequence[Any]]]) -> list[tuple[list[list[Any]]]]:
        """Return the arguments of each batch group: its micro-batches of every part."""
        return [([self._sent(part[group]) for part in parts],) for group in range(self.data_parallel)]

    def _sent(self, batches: Sequence[Any]) -> list[Any]:
        """Return the micro-batches of a batch group, without samples if they are sent to another process."""
        if self.rank_group.world.size == 1:
            return list(batches)
        return [
            item.without_samples() if isinstance(item, MicroBatch) else (item[0].without_samples(), *item[1:])
            for item in batches
        ]


def by_sample(batches: Sequence[MicroBatch], values: Sequence[Tensor]) -> dict[int, Tensor]:
    """Return the rows of each sample, by its index in the list that was batched.

    Args:
        values: for each micro-batch, a tensor [N, ...] with a row for each sampled token.
    """
    found: dict[int, Tensor] = {}
    for batch, tensor in zip(batches, values, strict=True):
        parts = tensor.split([sample.action_tokens for sample in batch.samples])
        found.update(zip(batch.rows, parts, strict=True))
    return found


def alone(learner: Learner) -> Learners:
    """Return the learners of a single process."""
    return Learners(RankGroup(World(), learner), learner.flops, learner.layout)
