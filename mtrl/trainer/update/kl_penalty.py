"""The KL to the reference as a part of the reward: a penalty on each turn for its distance from the reference."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from mtrl.algorithms.kl import KlController
from mtrl.trainer.data.samples import trajectory_samples
from mtrl.trainer.update.learner import Learners
from mtrl.types import Group, Sample


class KlPenalty:
    """Subtracts coefficient x k1, summed over the tokens of a turn, from the turn's reward.

    k1 = rollout - reference log-prob of the sampled tokens. In the reward it is unbiased (its expected value is the KL,
    and the gradient comes through the score function), while as a loss its expected gradient is 0.
    """

    def __init__(self, learners: Learners, controller: KlController, max_tokens: int):
        self.learners, self.controller, self.max_tokens = learners, controller, max_tokens

    @contextmanager
    def lowered(self, groups: Sequence[Group]) -> Iterator[float]:
        """Context in which the rewards of turns are lower by the penalty, for the advantages; it yields the mean k1 per
        token, in nats. After it the rewards are the task's again, which metrics and verdicts read, and the component
        `kl` of each turn is -k1.

        The penalty applies to all trajectories, including those that will not be trained on, since these count in the
        baseline of their group.
        """
        turns = [turn for group in groups for trajectory in group.trajectories for turn in trajectory.turns]
        rewards = [turn.reward for turn in turns]
        try:
            yield self._lower(groups)
        finally:
            for turn, reward in zip(turns, rewards, strict=True):
                turn.reward = reward

    def _lower(self, groups: Sequence[Group]) -> float:
        """Lower the rewards in place and store -k1 as the component `kl`. Return the mean k1 per token, in nats."""
        trajectories = {(g.group_id, t.index): t for g in groups for t in g.trajectories}
        samples = [s for t in trajectories.values() for s in trajectory_samples(t, [0.0] * len(t.turns))]
        total, tokens = 0.0, 0
        for sample, kl in zip(samples, self._k1(samples), strict=True):
            turns = np.array(sample.turns)[np.array(sample.loss_mask)]
            per_turn = np.bincount(turns, kl)
            for turn in np.unique(turns):
                penalised = trajectories[sample.group_id, sample.trajectory].turns[turn]
                penalised.components["kl"] = -float(per_turn[turn])
                penalised.reward += self.controller.coefficient * penalised.components["kl"]
            total, tokens = total + float(kl.sum()), tokens + len(kl)
        return total / max(tokens, 1)

    def _k1(self, samples: list[Sample]) -> list[np.ndarray]:
        """Return, for each sample, the rollout minus the reference log-prob of each sampled token."""
        found = self.learners.reference_logprobs(samples, self.max_tokens)
        pairs = zip(samples, found, strict=True)
        return [np.array(sample.logprobs)[np.array(sample.loss_mask)] - reference for sample, reference in pairs]
