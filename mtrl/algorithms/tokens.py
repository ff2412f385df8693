"""The input of a policy loss: the sampled tokens of a micro-batch in flat tensors."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenBatch:
    """N sampled tokens."""

    logprobs: Tensor
    """[N] log-probs under the policy, with gradient."""
    old_logprobs: Tensor
    """[N] log-probs under the old policy, as `algorithm.loss_anchor` selects it."""
    advantages: Tensor
    """[N] advantages."""
    rollout_logprobs: Tensor | None = None
    """[N] log-probs that the engine reported; None: the same as `old_logprobs`."""
    trajectory: Tensor | None = None
    """[N] int64 index of the trajectory of each token, from 0. All tokens of a trajectory are in the batch only for
    losses and corrections that are registered with `per_trajectory`. None: all tokens are of one trajectory."""

    @property
    def behaviour(self) -> Tensor:
        """[N] log-probs under the policy that sampled."""
        return self.old_logprobs if self.rollout_logprobs is None else self.rollout_logprobs

    @cached_property
    def _index(self) -> Tensor:
        return torch.zeros_like(self.logprobs, dtype=torch.long) if self.trajectory is None else self.trajectory

    def trajectory_sum(self, values: Tensor) -> Tensor:
        """[N] the sum of [N] values over the trajectory of each token."""
        count = int(self._index.max()) + 1 if len(self._index) else 0
        return values.new_zeros(count).index_add(0, self._index, values)[self._index]

    def trajectory_mean(self, values: Tensor) -> Tensor:
        """[N] the mean of [N] values over the trajectory of each token."""
        return self.trajectory_sum(values) / self.trajectory_sum(torch.ones_like(values))
