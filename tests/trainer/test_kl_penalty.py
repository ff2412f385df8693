"""The KL penalty: every turn is penalised for its own tokens, by k1 against the reference."""

import copy

import pytest
import torch
from alone import learners_of
from helpers import make_group, split_by_turn

from mtrl.algorithms.kl import KlController
from mtrl.config.schema import Config
from mtrl.trainer.update.kl_penalty import KlPenalty
from mtrl.trainer.update.policy import Policy
from mtrl.types import Group


def penalty_of(reference, coefficient, budget):
    learners = learners_of(Config(run_dir="unused"), reference, reference)
    return KlPenalty(learners, KlController(coefficient), budget)


def expected_kl(model, trajectory):
    """Return the sum of rollout - reference log-probs of each turn, by a plain forward over the whole conversation."""
    ids, sums = [], []
    for turn in trajectory.turns:
        ids += turn.observation_ids
        start = len(ids)
        ids += turn.action_ids
        logps = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        reference = [logps[start - 1 + i, token].item() for i, token in enumerate(turn.action_ids)]
        sums.append(sum(turn.action_logprobs) - sum(reference))
    return sums


@pytest.mark.parametrize("budget", [1, 10_000])
@pytest.mark.parametrize("split", [False, True])
def test_each_turn_is_penalised_for_its_tokens(make_tiny_model, budget, split):
    reference = make_tiny_model(1).requires_grad_(False)
    groups = [make_group(seed, reference.config.vocab_size) for seed in range(2)]
    cut = [Group(g.group_id, g.row, [split_by_turn(t) for t in g.trajectories]) if split else g for g in groups]
    before = [[turn.reward for turn in t.turns] for g in cut for t in g.trajectories]
    penalty = penalty_of(Policy(reference, None), 0.5, budget)
    cut[0].trajectories[0].trainable = False  # it is penalised too, since it is compared with the others
    with penalty.lowered(cut) as mean:
        lowered = [[turn.reward for turn in t.turns] for g in cut for t in g.trajectories]
    after = [t for g in cut for t in g.trajectories]
    assert before == [t.rewards for t in after], "metrics and verdicts read the rewards without the penalty"
    plain = [t for g in groups for t in g.trajectories]
    total = tokens = 0.0
    for was, low, penalised, original in zip(before, lowered, after, plain, strict=True):
        kls = expected_kl(reference, original)
        total, tokens = total + sum(kls), tokens + original.action_tokens
        for reward, less, turn, kl in zip(was, low, penalised.turns, kls, strict=True):
            assert turn.components["kl"] == pytest.approx(-kl, abs=1e-4)
            assert less == pytest.approx(reward - 0.5 * kl, abs=1e-4)
    assert mean == pytest.approx(total / tokens, abs=1e-4)


def test_a_policy_equal_to_the_reference_has_no_penalty(make_tiny_model):
    model = make_tiny_model(2)
    group = make_group(5, model.config.vocab_size)
    for trajectory in group.trajectories:
        ids = []
        for turn in trajectory.turns:
            ids += turn.observation_ids
            start = len(ids)
            ids += turn.action_ids
            logps = model(torch.tensor([ids])).logits[0].log_softmax(-1)
            turn.action_logprobs = [logps[start - 1 + i, token].item() for i, token in enumerate(turn.action_ids)]
    rewards = [t.rewards for t in group.trajectories]
    reference = Policy(copy.deepcopy(model).requires_grad_(False), None)
    with penalty_of(reference, 1.0, 64).lowered([group]) as mean:
        assert mean == pytest.approx(0.0, abs=1e-6)
        for trajectory, was in zip(group.trajectories, rewards, strict=True):
            assert trajectory.rewards == pytest.approx(was, abs=1e-5)
