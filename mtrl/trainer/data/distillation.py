"""On-policy distillation in a training step: a teacher scores the sampled tokens, and its log-probs become
advantages."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from mtrl.algorithms.batch import Floats, Ragged, fill
from mtrl.algorithms.distillation import mixed, reverse_kl
from mtrl.engines.endpoints.prompt_logprobs import PromptScorer
from mtrl.trainer.data.samples import Credited, group_samples
from mtrl.trainer.update.learner import Learners
from mtrl.types import Group, Sample


class Teacher(Protocol):
    """A model that scores sampled tokens."""

    def logprobs(self, samples: Sequence[Sample]) -> list[Floats]:
        """Return, for each sample, the teacher's log-prob of each sampled token.

        Raises:
            RunEndedError: the teacher does not answer.
        """

    def metrics(self) -> dict[str, float]:
        """Return metrics of the teacher since the start of the run, by name."""


class LocalTeacher:
    """The frozen model that every rank holds, or its shard of it; at the sampling temperature."""

    def __init__(self, learners: Learners, max_tokens: int):
        """`max_tokens`: maximum number of tokens of a micro-batch, padding included."""
        self.learners, self.max_tokens = learners, max_tokens

    def logprobs(self, samples: Sequence[Sample]) -> list[Floats]:
        """See `Teacher.logprobs`."""
        return self.learners.teacher_logprobs(samples, self.max_tokens)

    def metrics(self) -> dict[str, float]:
        """Return no metrics."""
        return {}


class ServedTeacher:
    """The model behind a completions server."""

    def __init__(self, scorer: PromptScorer):
        self.scorer = scorer

    def logprobs(self, samples: Sequence[Sample]) -> list[Floats]:
        """See `Teacher.logprobs`. It must not be called in the thread of a running event loop."""
        prompts = [sample.token_ids for sample in samples]
        scored = asyncio.run(self.scorer.score_all(prompts))
        return [np.array(logprobs)[np.array(s.loss_mask)] for s, logprobs in zip(samples, scored, strict=True)]

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
    """Adds weight x (log teacher - log policy) to the advantage of each sampled token, and multiplies the advantages
    that come from rewards by `reward_weight`.

    The policy's log-probs are those that the engine reported, which takes no further pass. The advantage of a token
    that an older policy sampled is therefore that of the older policy.
    """

    teacher: Teacher
    weight: float
    reward_weight: float

    def score(self, groups: Sequence[Group]) -> list[Floats]:
        """Return the teacher's log-probs of the sampled tokens of each sample of the trainable trajectories, in order.
        The groups are unchanged, so that a run whose teacher does not answer can use them later.

        Raises:
            RunEndedError: the teacher does not answer.
        """
        unrewarded = ([[0.0] * len(t.turns) for t in group.trajectories] for group in groups)
        pairs = zip(groups, unrewarded, strict=True)
        return self.teacher.logprobs([s for group, advantages in pairs for s in group_samples(group, advantages)])

    def apply(self, groups: Sequence[Group], credited: Credited, scored: Sequence[Floats]) -> dict[str, float]:
        """Change the advantages in place, and return metrics.

        Args:
            scored: result of `score` for these groups.

        `distillation/reverse_kl` is the mean of log policy - log teacher per token, in nats; `advantage_abs` and
        `reward_advantage_abs` are the mean magnitudes per token of the two parts of an advantage.
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
            kl = reverse_kl(np.array(sample.logprobs)[mask], teacher)
            advantages = mixed(rewarded, kl, self.reward_weight, self.weight)
            sample.advantages = fill(mask, advantages).tolist()
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
