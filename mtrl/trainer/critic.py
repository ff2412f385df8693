"""The critic: what it expects of every sampled token, the credit that gives, and how it learns."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mtrl.algorithms.advantages import estimate
from mtrl.algorithms.advantages.gae import lambda_returns, token_batch, turn_batch
from mtrl.algorithms.batch import CreditBatch, Ragged, fill
from mtrl.algorithms.losses import weighted_sum
from mtrl.algorithms.peers import ROUNDING, Floats
from mtrl.algorithms.registry import find_estimator
from mtrl.config.schema import AlgorithmConfig, Config
from mtrl.errors import UserError
from mtrl.models.checkpointing import checkpoint_gradients
from mtrl.models.value_head import ValueModel
from mtrl.trainer.batching import PACKED, PADDED, MicroBatch, check_packing, micro_batches
from mtrl.trainer.mini_batches import mini_batches
from mtrl.trainer.optimizer import Optimizer
from mtrl.trainer.policy import Policy
from mtrl.trainer.samples import trajectory_samples
from mtrl.types import Group, Sample, write_jsonl

MODEL, OPTIMIZER = "model.", "optimizer."
"""What the names of a critic's tensors begin with in a checkpoint."""


def make_critic(config: Config, policy: Policy, dump: Path) -> Critic | None:
    """The critic of a run, or None where `algorithm.advantage_method` reads none.

    Args:
        policy: what it starts from, unless `algorithm.critic.path` names a folder; its weights are copied.
        dump: where a batch goes whose loss is not finite.

    Raises:
        UserError: the folder cannot be used, or the architecture has no body to put a value head on.
    """
    if not find_estimator(config.algorithm.advantage_method).needs_critic:
        return None
    path = config.algorithm.critic.path
    model = copy.deepcopy(policy.model) if path is None else _load(path, config, policy.model)
    return Critic(config, ValueModel(model), dump)


def _load(path: str, config: Config, like: Any) -> Any:
    """The causal LM in a folder, set up as the policy's module is."""
    from transformers import AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=like.dtype,
            attn_implementation=config.model.attn_implementation,
            trust_remote_code=config.model.trust_remote_code,
        )
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise UserError(
            f"algorithm.critic.path={path} cannot be loaded ({first}); give a folder or a Hub name of a causal LM, or "
            "null for the policy's own weights"
        ) from error
    own, wanted = (m.config.get_text_config().vocab_size for m in (model, like))
    if own != wanted:
        raise UserError(
            f"algorithm.critic.path={path} has a vocabulary of {own} and the policy one of {wanted}, so they would not "
            "read the same tokens; give a model with the policy's tokenizer, or null for the policy's own weights"
        )
    if config.trainer.packing:
        check_packing(model)
    model.eval()
    if config.trainer.gradient_checkpointing:
        checkpoint_gradients(model)
    return model.to(like.device)


class Critic:
    """A value model and its optimiser.

    The value of a token is read where the token is predicted, so it knows everything before the token and nothing of
    it. `turn_gae` reads and trains the values of the turns' first tokens alone, `gae` all of them.
    """

    def __init__(self, config: Config, model: ValueModel, dump: Path):
        self.config, self.model, self.dump = config, model, dump
        self.settings = config.algorithm.critic
        self.optimizer = Optimizer(model, self.settings.optimizer, config.trainer.max_steps)
        self._per_token = find_estimator(config.algorithm.advantage_method).per_token

    @torch.no_grad()
    def values(self, samples: Sequence[Sample]) -> list[Floats]:
        """Per sample one value per sampled token, float64.

        Raises:
            UserError: one is not finite.
        """
        batches = self._batches(samples, [np.zeros(len(sample.token_ids)) for sample in samples])
        found: dict[int, Floats] = {}
        for batch in batches:
            values = self._forward(batch)
            if not values.isfinite().all():
                raise UserError(
                    "the critic gives values that are not finite; lower algorithm.critic.optimizer.lr or raise "
                    "model.dtype to float32"
                )
            parts = values.cpu().double().split([samples[row].action_tokens for row in batch.rows])
            found.update(zip(batch.rows, (part.numpy() for part in parts), strict=True))
        return [found[row] for row in range(len(samples))]

    def update(
        self, samples: Sequence[Sample], old_values: Sequence[Floats], targets: Sequence[Floats], step: int
    ) -> dict[str, float]:
        """Learn the targets in the optimiser steps of training step `step` (0-based); returns metrics `critic/…`.

        Args:
            samples: what is trained on; the mini-batches are the policy's.
            old_values, targets: per sample one number per sampled token. Under `turn_gae` those of the turns' first
                tokens are read.

        Raises:
            UserError: a loss or a gradient is not finite; the batch is dumped and the weights are as before it.
        """
        place = {id(sample): index for index, sample in enumerate(samples)}
        report = CriticReport()
        for part in mini_batches(samples, self.config.trainer, self.config.seed, step):
            chosen = [place[id(sample)] for sample in part]
            units = [self._units(sample) for sample in part]
            total = sum(int(unit.sum()) for unit in units)
            if not total:
                continue
            batches = self._batches(part, [unit / total for unit in units])
            self._optimiser_step(
                batches, [old_values[i] for i in chosen], [targets[i] for i in chosen], step, report, samples
            )
        if not report.updates:
            return {}
        units = [self._units(sample)[np.array(sample.loss_mask)] for sample in samples]
        old, wanted = (
            np.concatenate([v[u] for v, u in zip(values, units, strict=True)]) for values in (old_values, targets)
        )
        return report.metrics() | {"critic/value_mean": float(old.mean())} | explained_variance(old, wanted)

    def state(self) -> dict[str, Tensor]:
        """Weights and optimiser for a checkpoint, each tensor with storage of its own."""
        weights = {MODEL + name: value.detach().clone() for name, value in self.model.state_dict().items()}
        return weights | {OPTIMIZER + name: value for name, value in self.optimizer.state().items()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from `state`.

        Raises:
            UserError: it holds no critic.
        """
        parts = {
            prefix: {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
            for prefix in (MODEL, OPTIMIZER)
        }
        if not parts[MODEL]:
            method = self.config.algorithm.advantage_method
            raise UserError(
                f"algorithm.advantage_method={method} needs a critic, and the checkpoint has none; resume with the "
                "method that it was written with, or start anew with resume=none"
            )
        self.model.load_state_dict(parts[MODEL])
        self.optimizer.load(parts[OPTIMIZER])

    def _units(self, sample: Sample) -> NDArray[np.bool_]:
        """[L] the tokens whose values are trained."""
        turns = np.array(sample.turns)
        sampled = np.array(sample.loss_mask)
        return sampled if self._per_token else sampled & (turns != np.r_[-1, turns[:-1]])

    def _batches(self, samples: Sequence[Sample], weights: Sequence[np.ndarray]) -> list[MicroBatch]:
        trainer = self.config.trainer
        layout = PACKED if trainer.packing else PADDED
        device = self.model.head.weight.device
        return micro_batches(samples, weights, trainer.max_tokens_per_microbatch, device, layout=layout)

    def _forward(self, batch: MicroBatch) -> Tensor:
        """[N] the value before each sampled token."""
        return self.model(batch.action_mask, **batch.inputs)

    def _optimiser_step(
        self,
        batches: list[MicroBatch],
        old_values: list[Floats],
        targets: list[Floats],
        step: int,
        report: CriticReport,
        samples: Sequence[Sample],
    ) -> None:
        total = 0.0
        for batch in batches:
            old, wanted = batch.gather(old_values), batch.gather(targets)
            losses, clipped = value_losses(self._forward(batch), old, wanted, self.settings.value_clip)
            loss = weighted_sum(losses, batch.weights)
            total += loss.item()
            if not math.isfinite(total):
                self._stop("loss", total, step, samples)
            loss.backward()
            report.clipped += weighted_sum(clipped, batch.weights).item()
        norm, report.lr = self.optimizer.step(step)
        if not math.isfinite(norm):
            self._stop("gradient norm", norm, step, samples)
        report.updates += 1
        report.loss += total
        report.grad_norm += norm

    def _stop(self, what: str, value: float, step: int, samples: Sequence[Sample]) -> None:
        write_jsonl(self.dump, samples, mode="w")
        raise UserError(
            f"the critic's {what} is {value} at step {step + 1}; the batch is in {self.dump} and the weights are as "
            "before: look at its rewards, then lower algorithm.critic.optimizer.lr or raise model.dtype to float32"
        )


@dataclass
class CriticReport:
    """Sums over the optimiser steps of one training step."""

    updates: int = 0
    loss: float = 0.0
    clipped: float = 0.0
    """Shares of the trained values whose loss was clipped."""
    grad_norm: float = 0.0
    lr: float = 0.0

    def metrics(self) -> dict[str, float]:
        """Means; there must have been an update."""
        means = {"loss": self.loss, "clip_frac": self.clipped, "grad_norm": self.grad_norm}
        return {f"critic/{name}": total / self.updates for name, total in means.items()} | {"critic/lr": self.lr}


def value_losses(values: Tensor, old: Tensor, targets: Tensor, clip: float | None) -> tuple[Tensor, Tensor]:
    """½ max((v - R)², (v' - R)²), v' = v clipped to old ± `clip`, [N]; and 1 where the clip made it larger.

    A value that moved further than that towards its target gets no gradient, as a ratio in PPO's loss (OpenAI
    baselines; Engstrom et al., 2005.12729). None: ½ (v - R)².
    """
    free = (values - targets).square()
    near = values if clip is None else values.clamp(old - clip, old + clip)
    bounded = (near - targets).square()
    return 0.5 * torch.maximum(free, bounded), (bounded > free).to(free.dtype)


def explained_variance(values: Floats, targets: Floats) -> dict[str, float]:
    """`critic/explained_variance`, 1 - Var(R - V) / Var(R): 1 is perfect, 0 no better than a constant, and below it
    worse. Nothing where the targets are all the same, up to the rounding of their sums."""
    if np.ptp(targets) <= ROUNDING * max(abs(targets).max(), abs(values).max()):
        return {}
    return {"critic/explained_variance": 1.0 - float((targets - values).var() / targets.var())}


@dataclass
class Credited:
    """A step's groups with credit given: what the policy, and a critic, are to learn."""

    samples: list[Sample]
    """Of all trainable trajectories, with their advantages."""
    advantages: list[Ragged]
    """Per group, of every trajectory: one number per turn, the mean over its tokens."""
    old_values: list[Floats] = field(default_factory=list)
    """Per sample the critic's value before each sampled token; under `turn_gae` that of the token's turn."""
    targets: list[Floats] = field(default_factory=list)
    """Per sample what these values should have been, by lambda-returns."""


def credit_by_critic(
    groups: Sequence[Group],
    config: AlgorithmConfig,
    critic: Critic,
    component_weights: Mapping[str, float] | None = None,
) -> Credited:
    """Advantages by an estimator that needs a critic.

    All trajectories count in the whitening, those that will not be trained on included.

    Args:
        component_weights: `reward.components`, weight by name.

    Raises:
        UserError: a value is not finite.
        UserError, ValueError: as `estimate`.
    """
    turns = CreditBatch.of(groups, component_weights)
    parts = [trajectory_samples(t, [0.0] * len(t.turns)) for t in turns.trajectories]
    samples = list(chain.from_iterable(parts))
    values = np.concatenate([*critic.values(samples), np.zeros(0)])
    batch = (token_batch if find_estimator(config.advantage_method).per_token else turn_batch)(turns, values)
    columns = batch.tokens[batch.mask]

    def per_token(per_column: Floats) -> Floats:
        return np.repeat(per_column[batch.mask], columns)

    advantages = per_token(estimate(batch, config))
    for sample, own in zip(samples, _split(advantages, samples), strict=True):
        sample.advantages = fill(np.array(sample.loss_mask), own).tolist()
    trainable = [t.trainable for t, own in zip(turns.trajectories, parts, strict=True) for _ in own]

    def trained(per_sample: list) -> list:
        return [value for value, kept in zip(per_sample, trainable, strict=True) if kept]

    assert batch.values is not None
    return Credited(
        samples=trained(samples),
        advantages=turns.ragged(_turn_means(turns, advantages)),
        old_values=trained(_split(per_token(batch.values), samples)),
        targets=trained(_split(per_token(lambda_returns(batch, config)), samples)),
    )


def _split(per_token: Floats, samples: Sequence[Sample]) -> list[Floats]:
    """The numbers of all sampled tokens, cut where samples end."""
    return np.split(per_token, np.cumsum([sample.action_tokens for sample in samples], dtype=np.int64))[:-1]


def _turn_means(turns: CreditBatch, per_token: Floats) -> Floats:
    """[M, T] the mean of each turn's tokens; 0 for a turn without any."""
    counts = turns.tokens[turns.mask]
    sums = np.bincount(np.repeat(np.arange(len(counts)), counts), per_token, minlength=len(counts))
    return fill(turns.mask, sums / np.maximum(counts, 1))
