"""The case that compares gradients in bfloat16 with those in float32."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mtrl.algorithms.losses import weighted_sum
from mtrl.doctor.self_test.bench import Bench
from mtrl.doctor.self_test.outcome import CaseResult, judged
from mtrl.doctor.self_test.workload import batches_of, make_samples, new_learner, vocabulary

LEAST_COSINE = 0.98
"""Smallest cosine between the two gradients of a correct machine."""


def gradients(bench: Bench) -> CaseResult:
    """Compare the gradients of the same micro-batch."""
    exact = _gradients(bench, "trainer.fsdp.param_dtype=float32")
    half = _gradients(bench, bench.half)
    dot = sum((exact[name].double() * half[name]).sum().item() for name in exact)
    cosine = dot / (_norm(exact) * _norm(half))
    error = _norm({name: half[name] - exact[name] for name in exact}) / _norm(exact)
    problem = "" if cosine >= LEAST_COSINE else f"bfloat16 gradients deviate from float32 (least cosine {LEAST_COSINE})"
    evidence = f"bfloat16 against float32: cosine {cosine:.5f}, error {error:.2%}"
    return judged(problem, evidence, {"cosine": cosine, "relative_error": error})


def _gradients(bench: Bench, override: str) -> dict[str, Tensor]:
    """Return the whole gradients of the first micro-batch, on the CPU."""
    learner = new_learner(bench, bench.config(override))
    policy = learner.policy
    batch = batches_of(bench, make_samples(bench, vocabulary(learner)), learner.layout)[0].to(policy.device)
    logprobs, _ = policy.logprobs(batch)
    weighted_sum(-logprobs * batch.advantages, batch.weights).backward()
    named = policy.model.named_parameters()
    return {name: _whole(p.grad) for name, p in named if p.grad is not None}


def _whole(gradient: Any) -> Tensor:
    whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    return whole.to("cpu", torch.float32)


def _norm(gradients: dict[str, Tensor]) -> float:
    return torch.stack([value.double().norm() for value in gradients.values()]).norm().item()
