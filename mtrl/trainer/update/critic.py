"""The critic: its values of sampled tokens, the advantages computed from them, and its training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mtrl.algorithms.advantages import estimate
from mtrl.algorithms.advantages.gae import lambda_returns, token_batch, turn_batch
from mtrl.algorithms.batch import ROUNDING, CreditBatch, Floats, fill
from mtrl.algorithms.registry import find_estimator
from mtrl.config.algorithm_schema import AlgorithmConfig
from mtrl.config.schema import Config
from mtrl.errors import UserError
from mtrl.rewards.compose import RewardComposer
from mtrl.trainer.data.batching import MicroBatch, micro_batches, mini_batches
from mtrl.trainer.data.samples import Credited, comparable_batches, in_groups, trajectory_samples
from mtrl.trainer.update.learner import Learners
from mtrl.trainer.update.update_report import NonFiniteError
from mtrl.trainer.update.value_learner import ValueBatch
from mtrl.types import Group, Sample, write_jsonl


class Critic:
    """Computes the values of samples by the value model, and trains it.

    The value of a token is read at the position that predicts the token, so it depends on everything before the token
    and not on the token itself. `turn_gae` reads and trains only the values of the turns' first tokens, `gae` all.
    """

    def __init__(self, config: Config, learners: Learners, dump: Path):
        """Create the critic.

        Args:
            dump: file for a batch whose loss is not finite.
        """
        self.config, self.learners, self.dump = config, learners, dump
        self._per_token = find_estimator(config.algorithm.advantage_method).per_token

    def values(self, samples: Sequence[Sample]) -> list[Floats]:
        """Return, for each sample, one value per sampled token, float64.

        Raises:
            UserError: a value is not finite.
        """
        found = self.learners.values(samples, self.config.trainer.max_tokens_per_microbatch)
        if not all(np.isfinite(values).all() for values in found):
            raise UserError(
                "the critic gives values that are not finite; lower algorithm.critic.optimizer.lr or raise "
                "model.dtype to float32"
            )
        return found

    def update(
        self, samples: Sequence[Sample], old_values: Sequence[Floats], targets: Sequence[Floats], step: int
    ) -> dict[str, float]:
        """Train on the targets in the optimiser steps of training step `step` (0-based). Return metrics `critic/…`.

        Args:
            samples: samples to train on; the mini-batches are the same as the policy's.
            old_values, targets: per sample, one number per sampled token. With `turn_gae` only those of the turns'
                first tokens are read.

        Raises:
            UserError: a loss or a gradient is not finite. The batch is written to the dump file, and the optimiser step
                did not change the weights.
        """
        index_of = {id(sample): index for index, sample in enumerate(samples)}
        parts: list[list[ValueBatch]] = []
        for part in mini_batches(samples, self.config.trainer, self.config.seed, step):
            chosen = [index_of[id(sample)] for sample in part]
            value_batches = self._value_batches(part, [old_values[i] for i in chosen], [targets[i] for i in chosen])
            if value_batches:
                parts.append(value_batches)
        if not parts:
            return {}
        report = self.learners.update_critic(parts, step)
        if report.stopped:
            raise self._stopped(report.stopped, step, samples)
        units = [self._units(sample)[np.array(sample.loss_mask)] for sample in samples]
        old, wanted = (
            np.concatenate([v[u] for v, u in zip(values, units, strict=True)]) for values in (old_values, targets)
        )
        return report.metrics() | {"critic/value_mean": float(old.mean())} | explained_variance(old, wanted)

    def _value_batches(
        self, samples: Sequence[Sample], old_values: Sequence[Floats], targets: Sequence[Floats]
    ) -> list[ValueBatch]:
        """Return the batches of one optimiser step on these samples; empty if none of their tokens is trained."""
        units = [self._units(sample) for sample in samples]
        total = sum(int(unit.sum()) for unit in units)
        if not total:
            return []
        batches = self._batches(samples, [unit / total for unit in units])
        return [(batch, batch.gather(old_values), batch.gather(targets)) for batch in batches]

    def _units(self, sample: Sample) -> NDArray[np.bool_]:
        """Return a mask [L] of the tokens whose values are trained."""
        turns = np.array(sample.turns)
        sampled = np.array(sample.loss_mask)
        return sampled if self._per_token else sampled & (turns != np.r_[-1, turns[:-1]])

    def _batches(self, samples: Sequence[Sample], weights: Sequence[np.ndarray]) -> list[MicroBatch]:
        max_tokens, learners = self.config.trainer.max_tokens_per_microbatch, self.learners
        return micro_batches(samples, weights, max_tokens, layout=learners.layout, ranks=learners.data_parallel)

    def _stopped(self, error: NonFiniteError, step: int, samples: Sequence[Sample]) -> UserError:
        write_jsonl(self.dump, samples, mode="w")
        return UserError(
            f"the critic's {error.what} is {error.value} at step {step + 1}; the batch is in {self.dump} and the "
            "weights are as before: look at its rewards, then lower algorithm.critic.optimizer.lr or raise model.dtype "
            "to float32"
        )


def explained_variance(values: Floats, targets: Floats) -> dict[str, float]:
    """Return the metric `critic/explained_variance`, 1 - Var(R - V) / Var(R): 1 is perfect, 0 is as good as a constant,
    and below 0 is worse than a constant. The result is empty if all targets are equal, up to the rounding of their
    sums."""
    if np.ptp(targets) <= ROUNDING * max(abs(targets).max(), abs(values).max()):
        return {}
    return {"critic/explained_variance": 1.0 - float((targets - values).var() / targets.var())}


def credit_by_critic(
    groups: Sequence[Group], config: AlgorithmConfig, critic: Critic, composer: RewardComposer
) -> Credited:
    """Compute advantages by an estimator that needs a critic.

    All trajectories of a comparable batch (`comparable_batches`) count in its whitening, including those that will not
    be trained on.

    Raises:
        UserError: a value is not finite.
        UserError, ValueError: as for `estimate`.
    """
    batches = comparable_batches(groups, composer)
    credited = [_credit(batch, config, critic, composer.of(batch[0]).weights) for batch in batches]
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    place = {(trajectory.group_id, trajectory.index): place for place, trajectory in enumerate(trajectories)}
    trained = [row for own in credited for row in zip(own.samples, own.old_values, own.targets, strict=True)]
    trained.sort(key=lambda row: place[row[0].group_id, row[0].trajectory])
    return Credited(
        samples=[sample for sample, _, _ in trained],
        advantages=in_groups(groups, batches, [own.advantages for own in credited]),
        old_values=[values for _, values, _ in trained],
        targets=[targets for _, _, targets in trained],
    )


def _credit(
    groups: Sequence[Group], config: AlgorithmConfig, critic: Critic, component_weights: Mapping[str, float]
) -> Credited:
    """Compute advantages of one comparable batch. `component_weights` are those of `reward.components`, by name."""
    turns = CreditBatch.of(groups, component_weights)
    parts = [trajectory_samples(t, [0.0] * len(t.turns)) for t in turns.trajectories]
    samples, places = list(chain.from_iterable(parts)), _places(parts)
    values = np.concatenate([*critic.values(samples), np.zeros(0)])[places]
    is_per_token = find_estimator(config.advantage_method).per_token
    batch = (token_batch if is_per_token else turn_batch)(turns, values)
    columns = batch.tokens[batch.mask]

    def per_token(per_column: Floats) -> Floats:
        return np.repeat(per_column[batch.mask], columns)

    advantages = per_token(estimate(batch, config))
    for sample, own in zip(samples, _split(advantages, places, samples), strict=True):
        sample.advantages = fill(np.array(sample.loss_mask), own).tolist()
    trainable = [t.trainable for t, own in zip(turns.trajectories, parts, strict=True) for _ in own]

    def trained(per_sample: list) -> list:
        return [value for value, is_trained in zip(per_sample, trainable, strict=True) if is_trained]

    return Credited(
        samples=trained(samples),
        advantages=turns.ragged(_turn_means(turns, advantages)),
        old_values=trained(_split(values if is_per_token else _of_turns(turns, values), places, samples)),
        targets=trained(_split(per_token(lambda_returns(batch, config)), places, samples)),
    )


def _places(parts: Sequence[Sequence[Sample]]) -> NDArray[np.int64]:
    """Return, for the sampled tokens in the order of trajectories and turns, their places in the joined samples, [N].

    The orders differ where conversations of one trajectory interleave, since a turn extends any earlier turn.

    Args:
        parts: the samples of each trajectory.
    """
    numbered = [(place, np.array(sample.turns)) for place, own in enumerate(parts) for sample in own]
    turns = [own[own >= 0] for _, own in numbered]
    trajectories = [np.full(len(own), place) for (place, _), own in zip(numbered, turns, strict=True)]
    return np.lexsort([np.concatenate([*rows, np.zeros(0, np.int64)]) for rows in (turns, trajectories)])


def _split(per_token: Floats, places: NDArray[np.int64], samples: Sequence[Sample]) -> list[Floats]:
    """Split numbers of all sampled tokens, in the order of `_places`, by sample."""
    joined = np.empty_like(per_token)
    joined[places] = per_token
    return np.split(joined, np.cumsum([sample.action_tokens for sample in samples], dtype=np.int64))[:-1]


def _of_turns(turns: CreditBatch, values: Floats) -> Floats:
    """Return the value at the first token of each turn, [N], for each of the turn's tokens. A summary and the turn
    after it are one column of the batch and have a value each."""
    counts = np.array(
        [len(turn.action_ids) for t in turns.trajectories for turn in t.turns if turn.action_ids], np.int64
    )
    return np.repeat(values[np.cumsum(counts) - counts], counts)


def _turn_means(turns: CreditBatch, per_token: Floats) -> Floats:
    """Return the mean over each turn's tokens, [M, T]; 0 for a turn without tokens."""
    counts = turns.tokens[turns.mask]
    sums = np.bincount(np.repeat(np.arange(len(counts)), counts), per_token, minlength=len(counts))
    return fill(turns.mask, sums / np.maximum(counts, 1))
