"""Distribution of micro-batches to ranks: each once, the same number per rank, with balanced costs."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mtrl.trainer.data.batching import PACKED, PADDED, balance, cost, micro_batches
from mtrl.trainer.flops import ModelFlops
from mtrl.types import Sample

SMALL = ModelFlops(body=100_000, body_trained=100_000, head=10_000, head_trained=10_000, width=64, windows=(None, None))


def samples_of(lengths):
    rng = random.Random(0)
    return [
        Sample(
            token_ids=[rng.randrange(50) for _ in range(length)],
            loss_mask=[False] + [True] * (length - 1),
            logprobs=[0.0] * length,
            advantages=[1.0] * length,
            versions=[0] * length,
            turns=[0] * length,
            group_id=f"g{index // 2}",
            trajectory=index,
        )
        for index, length in enumerate(lengths)
    ]


def batches_of(lengths, budget, ranks, layout=PADDED, whole=False):
    samples = samples_of(lengths)
    weights = [np.full(length, 1.0 / sum(lengths)) for length in lengths]
    return micro_batches(samples, weights, budget, layout=layout, whole_trajectories=whole, ranks=ranks)


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.integers(2, 60), min_size=1, max_size=40),
    budget=st.integers(20, 300),
    ranks=st.integers(1, 5),
    layout=st.sampled_from([PADDED, PACKED]),
)
def test_every_sample_is_assigned_once_and_all_ranks_have_equally_many_micro_batches(lengths, budget, ranks, layout):
    batches = batches_of(lengths, budget, ranks, layout)
    assignments = balance(batches, ranks, SMALL)
    assert len(assignments) == ranks and len({len(share) for share in assignments}) == 1
    assert sorted(row for share in assignments for batch in share for row in batch.rows) == list(range(len(lengths)))
    total = sum(float(batch.weights.sum()) for share in assignments for batch in share)
    assert total == pytest.approx(sum(length - 1 for length in lengths) / sum(lengths))
    fillers = sum(batch.is_filler for share in assignments for batch in share)
    assert fillers == 0 or len(lengths) < ranks * len(assignments[0])  # only if there are too few samples
    assert all(batch.weights.any() != batch.is_filler for share in assignments for batch in share)
    for batch in batches:  # micro-batches that were split for the ranks stay within the budget
        assert batch.token_ids.numel() <= budget or len(batch.rows) == 1


def test_one_rank_gets_all_micro_batches_in_order():
    batches = batches_of([9, 3, 30, 12], 30, 1)
    assert balance(batches, 1, SMALL) == [batches]


def test_the_work_is_balanced():
    rng = random.Random(1)
    lengths = [min(2000, int(rng.lognormvariate(5, 1)) + 2) for _ in range(256)]
    batches = batches_of(lengths, 4096, 4)
    assignments = balance(batches, 4, SMALL)
    assert len(batches) == 20
    work = [sum(cost(batch, SMALL) for batch in share if not batch.is_filler) for share in assignments]
    rounds = [max(cost(batch, SMALL) for batch in row) for row in zip(*assignments, strict=True)]
    assert max(work) < 1.1 * sum(work) / 4
    in_order = [max(cost(batch, SMALL) for batch in batches[i::5]) for i in range(5)]
    assert sum(rounds) < 1.25 * sum(work) / 4 < 0.85 * sum(in_order)  # all ranks wait for the slowest of a round


def test_cost_counts_attention():
    """In a row tokens attend to all earlier ones, in a pack only to those of their own sample."""
    (row,) = batches_of([200], 10_000, 1)
    (pack,) = batches_of([100, 100], 10_000, 1, PACKED)
    (padded,) = batches_of([100, 60], 10_000, 1, PADDED)
    assert cost(row, SMALL) == SMALL.training([200], 199)
    assert cost(pack, SMALL) == SMALL.training([100, 100], 198) < cost(row, SMALL)
    assert cost(padded, SMALL) == SMALL.training([100, 100], 158)  # padding has a cost too


def test_a_trajectory_stays_in_one_micro_batch():
    samples = samples_of([10] * 6)
    for index, sample in enumerate(samples):
        sample.group_id, sample.trajectory = "g", index // 3
    weights = [np.ones(10)] * 6
    batches = micro_batches(samples, weights, 1000, whole_trajectories=True, ranks=4)
    assert sorted(sorted(batch.rows) for batch in batches) == [[0, 1, 2], [3, 4, 5]]
    assignments = balance(batches, 4, SMALL)
    assert [share[0].is_filler for share in assignments].count(True) == 2


def test_a_filler_has_the_tokens_of_a_micro_batch_and_no_weight():
    (batch,) = batches_of([9, 7], 100, 1)
    filler = batch.filler()
    assert torch.equal(filler.token_ids, batch.token_ids) and not filler.weights.any() and filler.is_filler
    assert batch.weights.any() and not batch.is_filler
