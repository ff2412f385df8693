"""Generalized advantage estimation: what came after each step, against what a critic had expected.

A step is a turn (`turn_gae`) or a sampled token (`gae`); a `CreditBatch` has a column for each, and the formulas are
the same. What the environment said is no step: it has no column, so no estimate passes through it.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from mtrl.algorithms.batch import CreditBatch, discounted_sums, fill, whiten
from mtrl.algorithms.peers import Floats
from mtrl.algorithms.registry import advantage_estimator
from mtrl.config.schema import AlgorithmConfig


@advantage_estimator("turn_gae", needs_critic=True)
@advantage_estimator("gae", needs_critic=True, per_token=True)
def gae(batch: CreditBatch, config: AlgorithmConfig) -> Floats:
    """A_t = Σ_l (gamma lambda)^l delta_{t+l}, delta_t = r_t + gamma V_{t+1} - V_t (GAE, 1506.02438, eq. 16).

    V is 0 after a trajectory's last column. With `whiten_advantages` the mean over the sampled tokens of the batch is
    subtracted and their standard deviation divided by; a turn weighs as many as it has.

    Raises:
        ValueError: the batch has no values.
    """
    advantages = raw_advantages(batch, config)
    if not config.whiten_advantages:
        return advantages
    summed = abs(batch.rewards) + (1.0 + config.gamma) * abs(values_of(batch))
    return whiten(advantages, batch.tokens, discounted_sums(summed, config.gamma * config.gae_lambda).max(initial=0.0))


def lambda_returns(batch: CreditBatch, config: AlgorithmConfig) -> Floats:
    """[M, T] A_t + V_t before whitening: what the critic should have said, TD(lambda); 0 in the padding.

    Raises:
        ValueError: the batch has no values.
    """
    return raw_advantages(batch, config) + values_of(batch)


def raw_advantages(batch: CreditBatch, config: AlgorithmConfig) -> Floats:
    """[M, T] A_t as it is in `gae`, not whitened."""
    values = values_of(batch)
    after = np.pad(values, ((0, 0), (0, 1)))[:, 1:]
    return discounted_sums(batch.rewards + config.gamma * after - values, config.gamma * config.gae_lambda)


def values_of(batch: CreditBatch) -> Floats:
    """[M, T] the critic's values, 0 in the padding.

    Raises:
        ValueError: there are none.
    """
    if batch.values is None:
        raise ValueError("gae and turn_gae need the values of a critic; CreditBatch.values is None")
    return np.where(batch.mask, batch.values, 0.0)


def turn_batch(turns: CreditBatch, values: Floats) -> CreditBatch:
    """The turns in which something was sampled, each with the value at its first token.

    Args:
        turns: of `CreditBatch.of`.
        values: [N] the critic's value before each sampled token of all trajectories, in their order.
    """
    acted = without_silent_turns(turns)
    counts = acted.tokens[acted.mask]
    return replace(acted, values=fill(acted.mask, values[np.cumsum(counts) - counts]))


def token_batch(turns: CreditBatch, values: Floats) -> CreditBatch:
    """A column per sampled token: the reward of a turn is on its last one.

    Args:
        turns, values: as of `turn_batch`.
    """
    acted = without_silent_turns(turns)
    rewards = np.zeros(len(values))
    rewards[np.cumsum(acted.tokens[acted.mask]) - 1] = acted.rewards[acted.mask]
    mask = np.arange(acted.lengths.max(initial=0)) < acted.lengths[:, None]
    return replace(
        acted, rewards=fill(mask, rewards), mask=mask, tokens=mask.astype(np.int64), values=fill(mask, values)
    )


def without_silent_turns(turns: CreditBatch) -> CreditBatch:
    """Without the turns in which nothing was sampled, where no token could learn from a reward or be given a value.

    Their rewards go to the turn before. A trajectory without any sampled token keeps nothing.
    """
    acted = turns.tokens > 0
    columns = np.arange(acted.shape[1])
    owner = np.maximum.accumulate(np.where(acted, columns, -1), axis=1)
    lost = (owner < 0) & (turns.rewards != 0.0) & acted.any(axis=1, keepdims=True)
    assert not lost.any(), "a reward before the first sampled token of a trajectory has no token to go to"
    paid = np.zeros_like(turns.rewards)
    rows, places = np.nonzero(owner >= 0)
    np.add.at(paid, (rows, owner[rows, places]), turns.rewards[rows, places])
    counts = acted.sum(axis=1)
    mask = np.arange(counts.max(initial=0)) < counts[:, None]
    return replace(turns, rewards=fill(mask, paid[acted]), mask=mask, tokens=fill(mask, turns.tokens[acted], np.int64))
