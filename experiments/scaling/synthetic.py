"""Synthetic rollouts of given sizes."""

from __future__ import annotations

import random

from mtrl.algorithms.reductions import token_weights
from mtrl.config.algorithm_schema import AlgorithmConfig
from mtrl.trainer.data.batching import PACKED, MicroBatch, micro_batches
from mtrl.trainer.data.samples import group_samples
from mtrl.types import FinishReason, Group, Sample, StopReason, Trajectory, Turn

GROUP = 8
"""Number of trajectories of a group."""
VOCABULARY = 150_000
TEXT = "what the model says, in words, about as long as its tokens are: four letters each. "


def make_turn(rng: random.Random, sampled: int, observed: int) -> Turn:
    """Return a turn whose ids and log-probs differ, so that each is an object of its own in memory, as in a run."""
    text = (TEXT * (sampled // 20 + 1))[: 4 * sampled]
    seen = (TEXT * (observed // 20 + 1))[: 4 * observed]
    return Turn(
        observation_ids=[rng.randrange(VOCABULARY) for _ in range(observed)],
        action_ids=[rng.randrange(VOCABULARY) for _ in range(sampled)],
        action_logprobs=[-rng.random() for _ in range(sampled)],
        version_spans=[(3, sampled)],
        finish=FinishReason.STOP,
        text=text,
        message={"role": "assistant", "content": text},
        observation=[{"role": "user", "content": seen}],
        reward=rng.random(),
    )


def make_groups(trajectories: int, turns: int, sampled: int, observed: int, seed: int = 0) -> list[Group]:
    """Return groups of `GROUP` trajectories with the given numbers of turns, and of tokens per turn."""
    rng = random.Random(seed)
    groups = []
    for number in range(-(-trajectories // GROUP)):
        members = [
            Trajectory(
                str(number),
                f"step0/{number}",
                index,
                [make_turn(rng, sampled, observed) for _ in range(turns)],
                StopReason.DONE,
                score=float(rng.random() < 0.5),
            )
            for index in range(min(GROUP, trajectories - GROUP * number))
        ]
        groups.append(Group(f"step0/{number}", {"id": str(number), "prompt": [], "ground_truth": {}}, members))
    return groups


def make_samples(trajectories: int, turns: int, sampled: int, observed: int) -> list[Sample]:
    """Return the samples of such groups."""
    groups = make_groups(trajectories, turns, sampled, observed)
    return [s for group in groups for s in group_samples(group, [[0.5] * turns for _ in group.trajectories])]


def batches_of(samples: list[Sample], ranks: int = 1) -> list[MicroBatch]:
    """Return micro-batches that are packed to the default number of tokens."""
    weights = token_weights(samples, AlgorithmConfig().loss_reduction, AlgorithmConfig())
    return micro_batches(samples, weights, 16384, layout=PACKED, ranks=ranks)
