"""Reductions: worked numbers, and gradients that do not depend on the cutting, packing or dropping of samples."""

import dataclasses
import itertools
import pickle

import numpy as np
import pytest
import torch

from mtrl.algorithms.losses import TokenBatch, ppo, weighted_sum
from mtrl.algorithms.reductions import Totals, token_weights
from mtrl.algorithms.registry import LOSSES, REDUCTIONS, find_loss
from mtrl.config.algorithm_schema import AlgorithmConfig
from mtrl.errors import UserError
from mtrl.types import Sample

CONFIG = AlgorithmConfig(max_sequence_length=8)
VOCABULARY = 5
every_reduction = pytest.mark.parametrize("reduction", REDUCTIONS.names())
PER_TOKEN = [name for name in LOSSES.names() if not find_loss(name).per_trajectory]


def a_sample(group, trajectory, turns, advantages=None, seed=0):
    """Return a sample with tokens of the given turns; -1 is context. `advantages` has one number per turn index."""
    rng = np.random.default_rng([seed, trajectory, *(t + 1 for t in turns)])
    sampled = [turn >= 0 for turn in turns]
    return Sample(
        token_ids=rng.integers(0, VOCABULARY, len(turns)).tolist(),
        loss_mask=sampled,
        logprobs=[float(-rng.uniform(0.5, 3)) if s else 0.0 for s in sampled],
        advantages=[(advantages or {}).get(turn, 0.0) if turn >= 0 else 0.0 for turn in turns],
        versions=[0 if s else -1 for s in sampled],
        turns=turns,
        group_id=group,
        trajectory=trajectory,
    )


def pieces(sample, *cuts):
    """Return the sample cut into several samples, each with all earlier tokens as context, as after a break."""
    bounds = [0, *cuts, len(sample.token_ids)]
    for start, end in itertools.pairwise(bounds):
        own = [start <= i for i in range(end)]
        yield dataclasses.replace(
            sample,
            token_ids=sample.token_ids[:end],
            loss_mask=[m and o for m, o in zip(sample.loss_mask[:end], own, strict=True)],
            logprobs=sample.logprobs[:end],
            advantages=sample.advantages[:end],
            versions=sample.versions[:end],
            turns=[t if o else -1 for t, o in zip(sample.turns[:end], own, strict=True)],
        )


STEP = [
    a_sample("a", 0, [-1, 0, 0, -1, 1, 1, 1, -1, 2], {0: 1.0, 1: -0.5, 2: 0.25}),
    a_sample("a", 1, [-1, 0, 0, 0, 0, 0], {0: -1.0}),
    a_sample("a", 2, [-1, 0, -1, 1, 1], {}),  # no advantage, in a group with signal
    a_sample("b", 0, [-1, -1, 0, -1, 1], {0: 0.5, 1: 0.5}),
    a_sample("b", 1, [-1, -1, 0, 0, 0, 0, 0, 0, 0], {0: -0.5}),
    a_sample("c", 0, [-1, 0, 0], {}),  # a group without signal
    a_sample("c", 1, [-1, 0], {}),
]


# ---- worked numbers (reference/algorithms.md 4.7)


@pytest.mark.parametrize(
    ("reduction", "width", "expected"),
    [
        ("token_mean", None, 2.5),
        ("seq_mean_token_sum", None, 7.5),
        ("sequence_mean", None, 2.25),
        ("seq_mean_token_mean", None, 2.25),
        ("seq_mean_token_sum_norm", 4, 1.875),
        ("seq_mean_token_sum_norm", 8, 0.9375),
    ],
)
def test_worked(reduction, width, expected):
    losses = [np.array([1.0, 2.0, np.nan, np.nan]), np.array([3.0, 3.0, 3.0, 3.0])]
    samples = [a_sample("g", 0, [0, 0, -1, -1]), a_sample("g", 1, [0, 0, 0, 0])]
    weights = token_weights(samples, reduction, AlgorithmConfig(max_sequence_length=width))
    assert sum(np.nansum(w * x) for w, x in zip(weights, losses, strict=True)) == pytest.approx(expected)


def test_turn_mean_is_the_mean_over_turns_of_the_token_mean():
    losses = [np.arange(len(s.token_ids), dtype=float) for s in STEP]
    by_turn = {}
    for sample, loss in zip(STEP, losses, strict=True):
        for turn, value in zip(sample.turns, loss, strict=True):
            if turn >= 0:
                by_turn.setdefault((sample.group_id, sample.trajectory, turn), []).append(value)
    weights = token_weights(STEP, "turn_mean", CONFIG)
    expected = np.mean([np.mean(values) for values in by_turn.values()])
    assert sum((w * x).sum() for w, x in zip(weights, losses, strict=True)) == pytest.approx(expected)


def test_prompt_mean_is_the_mean_over_prompts_of_the_token_mean():
    losses = [np.arange(len(s.token_ids), dtype=float) for s in STEP]
    by_prompt = {}
    for sample, loss in zip(STEP, losses, strict=True):
        by_prompt.setdefault(sample.group_id, []).extend(loss[np.array(sample.loss_mask)])
    weights = token_weights(STEP, "prompt_mean", CONFIG)
    expected = np.mean([np.mean(values) for values in by_prompt.values()])
    assert sum((w * x).sum() for w, x in zip(weights, losses, strict=True)) == pytest.approx(expected)


# ---- what the weights are


@every_reduction
def test_weights_are_aligned_and_zero_on_context(reduction):
    for sample, weights in zip(STEP, token_weights(STEP, reduction, CONFIG), strict=True):
        assert weights.shape == (len(sample.token_ids),)
        assert ((weights > 0) == np.array(sample.loss_mask)).all()


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean", "turn_mean", "prompt_mean"])
def test_means_have_weights_that_sum_to_one(reduction):
    assert sum(w.sum() for w in token_weights(STEP, reduction, CONFIG)) == pytest.approx(1.0)


def test_sequence_mean_does_not_depend_on_the_number_of_turns():
    weights = token_weights(STEP, "sequence_mean", CONFIG)
    assert [w.sum() for w in weights] == pytest.approx([1 / len(STEP)] * len(STEP))


def test_trajectories_with_one_index_in_different_groups_are_distinguished():
    samples = [a_sample("a", 0, [0]), a_sample("b", 0, [0, 0, 0])]
    assert [w[0] for w in token_weights(samples, "sequence_mean", CONFIG)] == pytest.approx([1 / 2, 1 / 6])


# ---- totals


def test_totals_add_up_over_ranks_and_pickle():
    whole = Totals.of(STEP)
    parts = pickle.loads(pickle.dumps(Totals.of(STEP[:3]))) + Totals.of(STEP[3:])
    assert parts.turn_tokens == whole.turn_tokens
    assert whole.tokens == sum(sample.action_tokens for sample in STEP)
    assert len(whole.trajectory_tokens) == 7 and len(whole.prompt_tokens) == 3 and len(whole.turn_tokens) == 11


def test_totals_without_a_turn_of_the_samples_are_an_error():
    with pytest.raises(ValueError, match="not in the totals"):
        token_weights(STEP, "token_mean", CONFIG, Totals.of(STEP[1:]))


def test_a_missing_constant_divisor_is_an_error():
    with pytest.raises(UserError, match="max_sequence_length"):
        token_weights(STEP, "seq_mean_token_sum_norm", AlgorithmConfig())


def test_no_samples_and_no_sampled_tokens():
    assert token_weights([], "token_mean", CONFIG) == []
    (weights, _) = token_weights([a_sample("a", 0, [-1, -1]), a_sample("a", 1, [0])], "sequence_mean", CONFIG)
    assert weights.tolist() == [0.0, 0.0]


# ---- gradients: a bigram policy, so that context matters and padding could leak


def gradient(batches, weights_of, loss_fn):
    """Return the gradient of a step whose padded micro-batches are computed one after another."""
    theta = torch.linspace(-1, 1, VOCABULARY * VOCABULARY, dtype=torch.float64).view(VOCABULARY, VOCABULARY)
    theta = theta.sin().requires_grad_()

    def padded(rows, dtype=float):
        rows = [torch.as_tensor(np.asarray(row, dtype=dtype)) for row in rows]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)

    for batch in batches:
        ids = padded([s.token_ids for s in batch], int)
        previous = torch.nn.functional.pad(ids, (1, 0))[:, :-1]
        sampled = padded([s.loss_mask for s in batch], bool)
        old, advantages, weights = (
            padded(rows)[sampled]
            for rows in ([s.logprobs for s in batch], [s.advantages for s in batch], [weights_of[id(s)] for s in batch])
        )
        losses, _ = loss_fn(TokenBatch(theta.log_softmax(-1)[previous, ids][sampled], old, advantages), CONFIG)
        weighted_sum(losses, weights).backward()
    return theta.grad


def weigh(samples, reduction, totals=None):
    return {id(s): w for s, w in zip(samples, token_weights(samples, reduction, CONFIG, totals), strict=True)}


@every_reduction
@pytest.mark.parametrize("loss", PER_TOKEN)
def test_the_gradient_is_that_of_the_step(reduction, loss):
    """The step has one, two or all samples per micro-batch, runs on two ranks, is cut into pieces, or omits samples
    without an advantage."""
    loss_fn = find_loss(loss)
    whole = gradient([STEP], weigh(STEP, reduction), loss_fn)
    assert whole.abs().max() > 1e-3

    def same(batches, weights):
        torch.testing.assert_close(gradient(batches, weights, loss_fn), whole, rtol=1e-10, atol=1e-14)

    for size in (1, 2):
        same([STEP[i : i + size] for i in range(0, len(STEP), size)], weigh(STEP, reduction))

    totals = Totals.of(STEP[:4]) + Totals.of(STEP[4:])
    on_ranks = weigh(STEP[:4], reduction, totals) | weigh(STEP[4:], reduction, totals)
    same([STEP[:4], STEP[4:]], on_ranks)

    cut = [*pieces(STEP[0], 3, 5), *pieces(STEP[1], 4), *STEP[2:]]  # at a turn, and within one
    same([cut[::2], cut[1::2]], weigh(cut, reduction))

    with_advantage = [sample for sample in STEP if any(sample.advantages)]
    assert len(with_advantage) == len(STEP) - 3
    same([with_advantage], weigh(with_advantage, reduction, Totals.of(STEP)))


def test_dropping_without_totals_would_change_the_step():
    """Without the totals the same test must fail."""
    with_advantage = [sample for sample in STEP if any(sample.advantages)]
    whole = gradient([STEP], weigh(STEP, "token_mean"), ppo)
    assert not torch.allclose(gradient([with_advantage], weigh(with_advantage, "token_mean"), ppo), whole, rtol=1e-2)
