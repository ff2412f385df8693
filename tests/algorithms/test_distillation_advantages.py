"""Advantages of on-policy distillation: worked numbers, and the gradient of the reverse KL by enumeration."""

import itertools
import math

import numpy as np
import pytest
import torch

from mtrl.algorithms.distillation import mixed, outside, reverse_kl, top_k_loss
from mtrl.algorithms.losses import TokenBatch
from mtrl.algorithms.registry import find_loss
from mtrl.config.algorithm_schema import AlgorithmConfig
from mtrl.types import TopTokens

SYMBOLS, LENGTH = 3, 2


def test_worked_numbers():
    """The policy samples a token with 1/2 that the teacher gives 1/8, one with 1/4 that it gives 1, and one that the
    teacher excludes."""
    kl = reverse_kl(np.log([0.5, 0.25, 1.0]), np.array([math.log(0.125), 0.0, -math.inf]))
    assert kl == pytest.approx([math.log(4), -math.log(4), 20.0])
    advantages = mixed(np.array([1.0, 1.0, -2.0]), kl, 0.5, 0.1)
    assert advantages == pytest.approx([0.5 - 0.1 * math.log(4), 0.5 + 0.1 * math.log(4), -3.0])


@pytest.mark.parametrize("top_k", range(SYMBOLS + 1))
@pytest.mark.parametrize("loss", ["ppo", "cispo", "importance_sampling"])
def test_the_expected_gradient_is_that_of_the_reverse_kl_in_the_states_that_the_policy_reaches(loss, top_k):
    """Autograd differentiates Σ_s P(s) KL(policy(s) || teacher(s)) with fixed P; the update's loss is summed over all
    sequences, each with its probability. It is the whole KL for any number of tokens that are summed exactly."""
    torch.manual_seed(0)
    states = 1 + SYMBOLS  # the start, and one for each first symbol
    logits = torch.randn(states, SYMBOLS, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(states, SYMBOLS, dtype=torch.float64).log_softmax(-1)
    policy = logits.log_softmax(-1)
    reached = torch.cat([torch.ones(1), policy[0].detach().exp()])
    divergence = (policy.exp() * (policy - teacher)).sum(-1)
    (expected,) = torch.autograd.grad((reached * divergence).sum(), logits, retain_graph=True)

    total = torch.zeros((), dtype=torch.float64)
    for first, second in itertools.product(range(SYMBOLS), repeat=LENGTH):
        visited, symbols = [0, 1 + first], [first, second]
        sampled = policy[visited, symbols]
        kl = reverse_kl(sampled.detach().numpy(), teacher[visited, symbols].numpy())
        logprobs, ids = teacher[visited].topk(top_k)
        kl = kl * outside(np.array(symbols), TopTokens(ids.numpy(), logprobs.numpy()))
        advantages = torch.from_numpy(mixed(np.zeros(LENGTH), kl, 1.0, 1.0))
        losses, _ = find_loss(loss)(TokenBatch(sampled, sampled.detach(), advantages), AlgorithmConfig())
        losses = losses + top_k_loss(policy[visited].gather(1, ids), logprobs)
        total = total + sampled.sum().detach().exp() * losses.sum()
    (found,) = torch.autograd.grad(total, logits)
    torch.testing.assert_close(found, expected)
    assert expected.abs().max() > 0.1


def test_the_sum_over_top_tokens_in_worked_numbers():
    """The policy has 1/2 and 1/4 where the teacher has 1/8 and 1/2; then 1 and 0, of which the teacher excludes both;
    then a token that the policy does not have."""
    student = torch.tensor([[0.5, 0.25], [1.0, 0.0], [0.5, 0.0]]).log().requires_grad_()
    teacher = torch.tensor([[0.125, 0.5], [0.0, 0.0], [0.5, 0.5]]).log()
    loss = top_k_loss(student, teacher)
    assert loss.tolist() == pytest.approx([0.5 * math.log(4) - 0.25 * math.log(2), 20.0, 0.0])
    loss.sum().backward()
    assert student.grad.tolist()[0] == pytest.approx([0.5 * math.log(4), -0.25 * math.log(2)])
    assert torch.isfinite(student.grad).all()
