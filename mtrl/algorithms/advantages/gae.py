"""Generalized advantage estimation: the rewards after each step, compared with the values that a critic predicted.

A step is a turn (`turn_gae`) or a sampled token (`gae`); a `CreditBatch` has a column for each, and the formulas are
the same. Tokens of the environment are not steps and have no column, so that no estimate bootstraps from them.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from mtrl.algorithms.batch import CreditBatch, Floats, discounted_sums, fill, whiten
from mtrl.algorithms.registry import advantage_estimator
from mtrl.config.algorithm_schema import AlgorithmConfig


@advantage_estimator("turn_gae", needs_critic=True)
@advantage_estimator("gae", needs_critic=True, per_token=True)
def gae(batch: CreditBatch, config: AlgorithmConfig) -> Floats:
    """A_t = Σ_l (gamma lambda)^l delta_{t+l}, delta_t = r_t + gamma V_{t+1} - V_t (GAE, 1506.02438, eq. 16).

    V is 0 after a trajectory's last column. With `whiten_advantages`, the advantages are normalised by their mean and
    standard deviation over the sampled tokens of the batch; a turn is weighted by its number of tokens.

    Raises:
        ValueError: the batch has no values.
    """
    advantages = raw_advantages(batch, config)
    if not config.whiten_advantages:
        return advantages
    summed = abs(batch.rewards) + (1.0 + config.gamma) * abs(values_of(batch))
    return whiten(advantages, batch.tokens, discounted_sums(summed, config.gamma * config.gae_lambda).max(initial=0.0))


def lambda_returns(batch: CreditBatch, config: AlgorithmConfig) -> Floats:
    """Return A_t + V_t before whitening, [M, T]: the TD(lambda) targets of the critic; 0 in the padding.

    Raises:
        ValueError: the batch has no values.
    """
    return raw_advantages(batch, config) + values_of(batch)


def raw_advantages(batch: CreditBatch, config: AlgorithmConfig) -> Floats:
    """Return the advantages A_t of `gae`, [M, T], without whitening."""
    values = values_of(batch)
    after = np.pad(values, ((0, 0), (0, 1)))[:, 1:]
    return discounted_sums(batch.rewards + config.gamma * after - values, config.gamma * config.gae_lambda)


def values_of(batch: CreditBatch) -> Floats:
    """Return the critic's values [M, T], 0 in the padding.

    Raises:
        ValueError: the batch has no values.
    """
    if batch.values is None:
        raise ValueError("gae and turn_gae need the values of a critic; CreditBatch.values is None")
    return np.where(batch.mask, batch.values, 0.0)


def turn_batch(turns: CreditBatch, values: Floats) -> CreditBatch:
    """Return the batch of all turns with sampled tokens, each with the critic's value at its first token.

    Args:
        turns: batch from `CreditBatch.of`.
        values: [N] the critic's value before each sampled token of all trajectories, in their order.
    """
    acted = without_silent_turns(turns)
    counts = acted.tokens[acted.mask]
    return replace(acted, values=fill(acted.mask, values[np.cumsum(counts) - counts]))


def token_batch(turns: CreditBatch, values: Floats) -> CreditBatch:
    """Return the batch with a column per sampled token, with the reward of each turn on its last token.

    Args:
        turns, values: as for `turn_batch`.
    """
    acted = without_silent_turns(turns)
    rewards = np.zeros(len(values))
    rewards[np.cumsum(acted.tokens[acted.mask]) - 1] = acted.rewards[acted.mask]
    mask = np.arange(acted.lengths.max(initial=0)) < acted.lengths[:, None]
    return replace(
        acted, rewards=fill(mask, rewards), mask=mask, tokens=mask.astype(np.int64), values=fill(mask, values)
    )


def without_silent_turns(turns: CreditBatch) -> CreditBatch:
    """Remove the turns without sampled tokens, which have no token to train and no value. In the layout of a single
    message they are the turns of which only the closing token was sampled.

    Their rewards are added to the turn before. Rewards before the first sampled token of a trajectory are left out,
    since no token has an influence on them. All turns of a trajectory without sampled tokens are removed.
    """
    acted = turns.tokens > 0
    columns = np.arange(acted.shape[1])
    owner = np.maximum.accumulate(np.where(acted, columns, -1), axis=1)
    rewards = np.zeros_like(turns.rewards)
    rows, places = np.nonzero(owner >= 0)
    np.add.at(rewards, (rows, owner[rows, places]), turns.rewards[rows, places])
    counts = acted.sum(axis=1)
    mask = np.arange(counts.max(initial=0)) < counts[:, None]
    return replace(
        turns, rewards=fill(mask, rewards[acted]), mask=mask, tokens=fill(mask, turns.tokens[acted], np.int64)
    )
