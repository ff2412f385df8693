"""Reductions: the weight of each token in the loss of an optimiser step.

The loss of a step is Σ weight x token loss, over all its micro-batches and ranks. The weights are computed once, before
the samples are packed, from counts over the whole step (`Totals`). So the loss depends neither on the packing, nor on
the number of samples per trajectory, nor on whether samples without an advantage were left out.

The weight is the same for all tokens of a turn; a reduction is therefore one formula per turn, registered by name.
Gradients are summed, not averaged: where the backend averages them over ranks (FSDP), multiply the loss by the number
of ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from mtrl.algorithms.registry import find_reduction, reduction
from mtrl.config.algorithm_schema import AlgorithmConfig
from mtrl.errors import UserError
from mtrl.types import Sample

TurnKey = tuple[str, int, int]
"""Group id, index of the trajectory, index of the turn."""


@dataclass(frozen=True)
class Totals:
    """Numbers of sampled tokens of each turn of an optimiser step, for the denominators.

    They must be counted over all samples of the step, including those left out of the update; `+` adds the counts of
    disjoint sets of samples (of other ranks, of dropped samples). The object holds no arrays and can be pickled.
    """

    turn_tokens: Counter[TurnKey] = field(default_factory=Counter)

    @classmethod
    def of(cls, samples: Iterable[Sample]) -> Totals:
        counts: Counter[TurnKey] = Counter()
        for sample in samples:
            tokens = np.bincount(_turns(sample) + 1)[1:]  # entry 0 counts the tokens that the policy did not sample
            counts.update({_key(sample, turn): int(tokens[turn]) for turn in tokens.nonzero()[0]})
        return cls(counts)

    def __add__(self, other: Totals) -> Totals:
        return Totals(self.turn_tokens + other.turn_tokens)

    @cached_property
    def trajectory_tokens(self) -> Counter[tuple[str, int]]:
        """Number of tokens by (group id, trajectory), over all samples of the trajectory."""
        return _sum_by(self.turn_tokens, 2)

    @cached_property
    def prompt_tokens(self) -> Counter[tuple[str]]:
        """Number of tokens by (group id,)."""
        return _sum_by(self.turn_tokens, 1)

    @cached_property
    def tokens(self) -> int:
        """Number of all sampled tokens of the step."""
        return self.turn_tokens.total()


def token_weights(
    samples: Sequence[Sample], reduction: str, config: AlgorithmConfig, totals: Totals | None = None
) -> list[np.ndarray]:
    """Return the weight of each token, as one float64 array of length L per sample; 0 for tokens that the policy did
    not sample.

    Args:
        samples: samples of one optimiser step on this rank.
        totals: counts over the whole step, on all ranks; None: `samples` are the whole step.

    Raises:
        UserError: the reduction is unknown, or a setting that it needs is missing.
        ValueError: a turn of `samples` is not counted in `totals`.
    """
    weight_of = find_reduction(reduction)
    totals = Totals.of(samples) if totals is None else totals
    return [_sample_weights(sample, weight_of, config, totals) for sample in samples]


def _sample_weights(
    sample: Sample, weight_of: Callable[..., float], config: AlgorithmConfig, totals: Totals
) -> np.ndarray:
    turns = _turns(sample) + 1
    by_turn = np.zeros(turns.max(initial=0) + 1)  # entry 0 is for the tokens that the policy did not sample
    for turn in np.bincount(turns)[1:].nonzero()[0]:
        key = _key(sample, turn)
        if not totals.turn_tokens[key]:
            raise ValueError(f"turn {key} is not in the totals; count them over all samples of the optimiser step")
        by_turn[turn + 1] = weight_of(key, totals, config)
    return by_turn[turns]


@reduction("token_mean")
def token_mean(key: TurnKey, totals: Totals, config: AlgorithmConfig) -> float:
    """1 / tokens: every token has the same weight, so long trajectories count more (DAPO, 2503.14476)."""
    return 1.0 / totals.tokens


@reduction("sequence_mean", aliases=("seq_mean_token_mean",))
def sequence_mean(key: TurnKey, totals: Totals, config: AlgorithmConfig) -> float:
    """1 / (trajectory's tokens x trajectories): every trajectory has the same weight (GRPO, 2402.03300)."""
    return 1.0 / (totals.trajectory_tokens[key[:2]] * len(totals.trajectory_tokens))


@reduction("seq_mean_token_sum")
def seq_mean_token_sum(key: TurnKey, totals: Totals, config: AlgorithmConfig) -> float:
    """1 / trajectories: the log-prob of a trajectory is the sum over its tokens, as in the policy gradient theorem."""
    return 1.0 / len(totals.trajectory_tokens)


@reduction("seq_mean_token_sum_norm")
def seq_mean_token_sum_norm(key: TurnKey, totals: Totals, config: AlgorithmConfig) -> float:
    """1 / (trajectories x `max_sequence_length`): `seq_mean_token_sum` divided by a constant (Dr. GRPO, 2503.20783).

    Raises:
        UserError: `algorithm.max_sequence_length` is not set.
    """
    if not config.max_sequence_length or config.max_sequence_length < 0:
        raise UserError(
            f"algorithm.loss_reduction=seq_mean_token_sum_norm divides by algorithm.max_sequence_length, "
            f"which is {config.max_sequence_length}; set it to a positive number of tokens"
        )
    return 1.0 / (len(totals.trajectory_tokens) * config.max_sequence_length)


@reduction("turn_mean")
def turn_mean(key: TurnKey, totals: Totals, config: AlgorithmConfig) -> float:
    """1 / (turn's tokens x turns): every turn of the step has the same weight, so trajectories of many turns count
    more.

    Under `sequence_mean` a token of a short trajectory has a larger weight than a token of a long one. This was
    observed to shorten turns by 80 % without a gain in accuracy (cua-lite#13).
    """
    return 1.0 / (totals.turn_tokens[key] * len(totals.turn_tokens))


@reduction("prompt_mean")
def prompt_mean(key: TurnKey, totals: Totals, config: AlgorithmConfig) -> float:
    """1 / (tokens of the prompt's group x prompts): every prompt has the same weight (ScaleRL, 2510.13786)."""
    return 1.0 / (totals.prompt_tokens[key[:1]] * len(totals.prompt_tokens))


def _turns(sample: Sample) -> np.ndarray:
    """[L] index of the turn that sampled each token; -1 for tokens that the policy did not sample."""
    return np.fromiter(sample.turns, np.int64, len(sample.turns))


def _key(sample: Sample, turn: np.integer) -> TurnKey:
    return sample.group_id, sample.trajectory, int(turn)


def _sum_by(counts: Counter[TurnKey], parts: int) -> Counter:
    """Sum the counts over the keys that have the same first `parts` elements."""
    sums: Counter = Counter()
    for key, count in counts.items():
        sums[key[:parts]] += count
    return sums
