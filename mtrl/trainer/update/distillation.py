"""On-policy distillation in a training step: a teacher scores the sampled tokens, and its log-probs become advantages
and, for its most probable tokens, a term of the loss."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from mtrl.algorithms.batch import Ragged, fill
from mtrl.algorithms.distillation import TeacherScores, mixed, outside, reverse_kl
from mtrl.engines.endpoints.prompt_logprobs import PromptScorer
from mtrl.trainer.data.samples import Credited, group_samples
from mtrl.trainer.update.learner import Learners
from mtrl.types import Group, Sample, TopTokens


class Teacher(Protocol):
    """A model that scores sampled tokens."""

    def scores(self, samples: Sequence[Sample]) -> list[TeacherScores]:
        """Return, for each sample, what the teacher says about its sampled tokens.

        Raises:
            RunEndedError: the teacher does not answer.
        """

    def metrics(self) -> dict[str, float]:
        """Return metrics of the teacher since the start of the run, by name."""


class LocalTeacher:
    """The frozen model that every rank holds, or its shard of it; at the sampling temperature."""

    def __init__(self, learners: Learners, top_k: int, max_tokens: int):
        """Create the teacher.

        Args:
            top_k: number of most probable tokens to return.
            max_tokens: maximum number of tokens of a micro-batch, padding included.
        """
        self.learners, self.top_k, self.max_tokens = learners, top_k, max_tokens

    def scores(self, samples: Sequence[Sample]) -> list[TeacherScores]:
        """See `Teacher.scores`."""
        return self.learners.teacher_scores(samples, self.top_k, self.max_tokens)

    def metrics(self) -> dict[str, float]:
        """Return no metrics."""
        return {}


class ServedTeacher:
    """The model behind a completions server."""

    def __init__(self, scorer: PromptScorer):
        self.scorer = scorer

    def scores(self, samples: Sequence[Sample]) -> list[TeacherScores]:
        """See `Teacher.scores`. It must not be called in the thread of a running event loop."""
        prompts = [sample.token_ids for sample in samples]
        pairs = zip(samples, asyncio.run(self.scorer.score_all(prompts)), strict=True)
        masked = [(np.array(sample.loss_mask), scored) for sample, scored in pairs]
        return [
            TeacherScores(np.array(scored.logprobs)[mask], TopTokens(scored.top.ids[mask], scored.top.logprobs[mask]))
            for mask, scored in masked
        ]

    def check(self, tokenizer: Any) -> None:
        """Check that the server answers, and that its tokens are those of the policy's tokenizer.

        Raises:
            UserError: it does not answer as needed, or its tokens differ.
        """
        asyncio.run(self.scorer.check(tokenizer))

    def metrics(self) -> dict[str, float]:
        """Return requests, tokens and cost, as `Spending.metrics`."""
        return self.scorer.client.budget.metrics()


@dataclass
class Distillation:
    """Adds weight x (log teacher - log policy) to the advantage of each sampled token that is none of the teacher's
    most probable ones, gives the samples these, and multiplies the advantages that come from rewards by
    `reward_weight`.

    The policy's log-probs are those that the engine reported, which takes no further pass. The advantage of a token
    that an older policy sampled is therefore that of the older policy.
    """

    teacher: Teacher
    weight: float
    reward_weight: float

    def score(self, groups: Sequence[Group]) -> list[TeacherScores]:
        """Return what the teacher says about each sample of the trainable trajectories, in order. The groups are
        unchanged, so that a run whose teacher does not answer can use them later.

        Raises:
            RunEndedError: the teacher does not answer.
        """
        unrewarded = ([[0.0] * len(t.turns) for t in group.trajectories] for group in groups)
        pairs = zip(groups, unrewarded, strict=True)
        return self.teacher.scores([s for group, advantages in pairs for s in group_samples(group, advantages)])

    def apply(self, groups: Sequence[Group], credited: Credited, scored: Sequence[TeacherScores]) -> dict[str, float]:
        """Change the advantages in place, and return metrics.

        Args:
            scored: result of `score` for these groups.

        The advantages of turns, which only records and metrics use, have the teacher's part for every token, as one
        sample of what the loss sums. `distillation/reverse_kl` is the mean of log policy - log teacher per token, in
        nats; `advantage_abs` and `reward_advantage_abs` are the mean magnitudes per token of the two parts.
        """
        places: dict[tuple[str, int], list[float]] = {}
        credited.advantages = [self._scaled(rewarded) for rewarded in credited.advantages]
        for group, advantages in zip(groups, credited.advantages, strict=True):
            places |= {
                (group.group_id, t.index): turns for t, turns in zip(group.trajectories, advantages, strict=True)
            }
        kls, parts = [np.zeros(0)], [np.zeros(0)]
        for sample, teacher in zip(credited.samples, scored, strict=True):
            mask = np.array(sample.loss_mask)
            rewarded = np.array(sample.advantages)[mask]
            kl = reverse_kl(np.array(sample.logprobs)[mask], teacher.logprobs)
            advantages = mixed(rewarded, kl, self.reward_weight, self.weight)
            left = np.where(outside(np.array(sample.token_ids)[mask], teacher.top), kl, 0.0)
            sample.advantages = fill(mask, mixed(rewarded, left, self.reward_weight, self.weight)).tolist()
            sample.teacher = teacher.top
            turns = np.array(sample.turns)[mask]
            for turn in np.unique(turns):
                places[sample.group_id, sample.trajectory][turn] = float(advantages[turns == turn].mean())
            kls.append(kl)
            parts.append(self.reward_weight * rewarded)
        kl, rewarded = np.concatenate(kls), np.concatenate(parts)
        found = {
            "reverse_kl": kl.mean() if len(kl) else 0.0,
            "advantage_abs": self.weight * abs(kl).mean() if len(kl) else 0.0,
            "reward_advantage_abs": abs(rewarded).mean() if len(kl) else 0.0,
        }
        found |= self.teacher.metrics()
        return {f"distillation/{name}": float(value) for name, value in found.items()}

    def _scaled(self, rewarded: Ragged) -> Ragged:
        return [[self.reward_weight * advantage for advantage in turns] for turns in rewarded]
