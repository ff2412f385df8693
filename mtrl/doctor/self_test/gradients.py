"""The case that compares gradients in bfloat16 with those in float32."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mtrl.algorithms.losses import weighted_sum
from mtrl.doctor.self_test.bench import Bench
from mtrl.doctor.self_test.outcome import CaseResult, judged
from mtrl.doctor.self_test.workload import batches_of, make_samples, new_learner, vocabulary
from mtrl.trainer.data.batching import MicroBatch
from mtrl.trainer.update.policy import Policy

LEAST_COSINE = 0.98
"""Smallest cosine between the two gradients of a correct machine."""


def gradients(bench: Bench) -> CaseResult:
    """Compare the gradients of the same micro-batch."""
    exact = _gradients(bench, "trainer.fsdp.param_dtype=float32")
    half = _gradients(bench, bench.half)
    dot = sum((exact[name].double() * half[name]).sum().item() for name in exact)
    cosine = dot / (norm(exact) * norm(half))
    error = distance(half, exact) / norm(exact)
    problem = "" if cosine >= LEAST_COSINE else f"bfloat16 gradients deviate from float32 (least cosine {LEAST_COSINE})"
    evidence = f"bfloat16 against float32: cosine {cosine:.5f}, error {error:.2%}"
    return judged(problem, evidence, {"cosine": cosine, "relative_error": error})


def loss_of(policy: Policy, batch: MicroBatch) -> Tensor:
    """Return the loss of policy gradients over a micro-batch, a scalar."""
    logprobs, _ = policy.logprobs(batch)
    return weighted_sum(-logprobs * batch.advantages, batch.weights)


def whole_gradients(policy: Policy) -> dict[str, Tensor]:
    """Return the whole gradients by name, in float32 on the CPU."""
    named = policy.model.named_parameters()
    return {name: _whole(p.grad) for name, p in named if p.grad is not None}


def norm(gradients: Mapping[str, Tensor]) -> float:
    return torch.stack([value.double().norm() for value in gradients.values()]).norm().item()


def distance(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """Return the norm of the difference of two gradients."""
    return norm({name: one[name] - value for name, value in other.items()})


def _gradients(bench: Bench, override: str) -> dict[str, Tensor]:
    """Return the whole gradients of the first micro-batch, on the CPU."""
    learner = new_learner(bench, bench.config(override))
    policy = learner.policy
    batches = batches_of(bench, make_samples(bench, vocabulary(learner)), learner.layout)
    loss_of(policy, batches[0].to(policy.device)).backward()
    return whole_gradients(policy)


def _whole(gradient: Any) -> Tensor:
    whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    return whole.to("cpu", torch.float32)
