"""Each rank's share of the models that are trained; the leader calls its methods on all ranks at the same time."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from mtrl.distributed.sharding import named_tensors
from mtrl.errors import UserError
from mtrl.trainer.checkpoint.saver import Saver
from mtrl.trainer.checkpoint.tensors import load_tensors, tensor_names
from mtrl.trainer.data.batching import MicroBatch
from mtrl.trainer.flops import ModelFlops, model_flops
from mtrl.trainer.update.optimizer import Optimizer
from mtrl.trainer.update.policy_learner import PolicyLearner, UpdateReport
from mtrl.trainer.update.value_learner import CriticReport, ValueBatch, ValueLearner

CRITIC = "critic."
"""Prefix of the names of the critic's tensors in a checkpoint."""


class Learner:
    """A rank's share of the policy with its reference, and of the critic, each with its optimiser.

    Every method is called on all ranks at the same time, with work for each rank, since a sharded model needs all ranks
    at every layer.
    """

    def __init__(self, policy: PolicyLearner | None, critic: ValueLearner | None = None, saver: Saver | None = None):
        self._policy, self._critic = policy, critic
        self.saver = saver or Saver()

    @property
    def policy(self) -> PolicyLearner:
        assert self._policy is not None
        return self._policy

    @property
    def critic(self) -> ValueLearner:
        assert self._critic is not None
        return self._critic

    @property
    def has_critic(self) -> bool:
        return self._critic is not None

    @property
    def flops(self) -> ModelFlops:
        """FLOPs of the policy, or of the critic if there is no policy."""
        return model_flops(self._policy.policy.model if self._policy else self.critic.model)

    def reference_logprobs(self, batches: list[MicroBatch]) -> list[Tensor]:
        """Return the reference's log-probs, [N] for each micro-batch."""
        return self.policy.reference_logprobs(batches)

    def logprobs(self, batches: list[MicroBatch]) -> list[Tensor]:
        """Return the policy's log-probs, [N] for each micro-batch, without gradients."""
        return self.policy.logprobs(batches)

    def values(self, batches: list[MicroBatch]) -> list[Tensor]:
        """Return the critic's values, [N] for each micro-batch."""
        return self.critic.values(batches)

    def update(self, parts: list[list[MicroBatch]], step: int, kl_coefficient: float) -> UpdateReport:
        """Make one optimiser step of the policy for each part."""
        return self.policy.update(parts, step, kl_coefficient)

    def update_critic(self, parts: list[list[ValueBatch]], step: int) -> CriticReport:
        """Make one optimiser step of the critic for each part."""
        return self.critic.update(parts, step)

    def weights(self) -> dict[str, Tensor] | None:
        """Return the weights for an engine with its own copy, on the leader; None on other ranks."""
        return self.policy.policy.weights()

    def release(self) -> None:
        """Free cached GPU memory for the servers that share the device."""
        torch.cuda.empty_cache()

    def export(self, folder: Path) -> None:
        """Write the policy as a Hugging Face folder; only the leader writes."""
        self.policy.policy.export(folder)

    def save(self, folder: Path) -> None:
        """Write the current values of this rank's shards of all weights and moments (`Saver.save`)."""
        self.saver.save(self._weights() | self._moments(), folder)

    def wait_saved(self) -> None:
        """Return when the last checkpoint is on the disk.

        Raises:
            UserError: the checkpoint could not be written.
        """
        self.saver.wait()

    def load(self, folder: Path) -> None:
        """Load the tensors of a checkpoint, which any number of ranks may have written.

        Raises:
            UserError: the tensors do not fit the model and the settings.
        """
        names = tensor_names(folder)
        if self._critic and not any(name.startswith(CRITIC) for name in names):
            raise UserError(
                f"checkpoint {folder} has no critic, and algorithm.advantage_method needs one; resume with the method "
                "that it was written with, or start anew with resume=none"
            )
        into = self._weights()
        for prefix, optimizer in self._optimizers().items():
            mine = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
            into |= {prefix + name: value for name, value in optimizer.allocate(mine).items()}
        load_tensors(into, folder)

    def _weights(self) -> dict[str, Tensor]:
        """Return all weights by name, without copies. For a policy with adapters these are only the adapters, since the
        other weights never change."""
        policy = self.policy.policy
        own = named_tensors(policy.model, trainable_only=policy.adapted)
        found = {f"model.{name}": value for name, value in own.items()}
        if self._critic:
            found |= {f"{CRITIC}model.{name}": value for name, value in named_tensors(self._critic.model).items()}
        return found

    def _moments(self) -> dict[str, Tensor]:
        return {
            prefix + name: value
            for prefix, optimizer in self._optimizers().items()
            for name, value in optimizer.state().items()
        }

    def _optimizers(self) -> dict[str, Optimizer]:
        """Return the optimisers by the prefix of the names of their tensors."""
        found = {"optimizer.": self.policy.optimizer}
        return found | ({f"{CRITIC}optimizer.": self._critic.optimizer} if self._critic else {})
