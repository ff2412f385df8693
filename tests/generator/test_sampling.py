"""One token per row: the right distribution, and a function of seed, position and distribution alone."""

import numpy as np
import pytest
import torch

from mtrl.generator.engines.base import SamplingParams
from mtrl.generator.engines.local.sampling import AHEAD, SamplingRows, Uniforms, counter_uniform, sample

LOGITS = torch.tensor([2.0, 0.0, -1.0, 1.0, -30.0, 0.5, -0.5, 1.5])
DRAWS = 20_000
CHI_SQUARE_7 = 29.9
"""A fair sample of eight classes exceeds it once in ten thousand times (the seeds are fixed, so here never)."""


def uniforms(seeds, positions):
    return torch.from_numpy(counter_uniform(np.asarray(seeds, dtype=np.uint64), np.asarray(positions)))


def chi_square(counts, probabilities):
    expected = probabilities * counts.sum()
    kept = expected > 1e-6
    assert not counts[~kept].any(), "what has no probability is never drawn"
    return ((counts - expected)[kept] ** 2 / expected[kept]).sum()


def draw(draws, temperature, **cut):
    rows = SamplingRows.of([SamplingParams(temperature=temperature, **cut)] * len(draws))
    return sample(LOGITS.repeat(len(draws), 1), rows, draws)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("over", ["seeds", "positions"])
def test_the_distribution_is_the_softmax(temperature, over):
    many, one = np.arange(DRAWS), np.full(DRAWS, 7)
    ids, logprobs = draw(uniforms(many, one) if over == "seeds" else uniforms(one, many), temperature)
    expected = torch.log_softmax(LOGITS / temperature, -1)
    torch.testing.assert_close(logprobs, expected[ids])
    assert chi_square(np.bincount(ids, minlength=8), expected.double().exp().numpy()) < CHI_SQUARE_7


def test_neighbouring_streams_do_not_go_together():
    """The pair of tokens at two positions, or of two seeds, is as if they were independent."""
    first, second = uniforms(np.arange(DRAWS), np.full(DRAWS, 3)), uniforms(np.arange(DRAWS) + 1, np.full(DRAWS, 3))
    third = uniforms(np.arange(DRAWS), np.full(DRAWS, 4))
    for a, b in ((first, second), (first, third)):
        assert abs(np.corrcoef(a, b)[0, 1]) < 4 / DRAWS**0.5


def test_uniforms_are_below_one_and_take_large_seeds():
    values = uniforms([0, 2**64 - 1, 2**63], [0, 0, 2**31])
    assert ((values >= 0) & (values < 1)).all() and len(set(values.tolist())) == 3


def test_uniforms_go_on_from_position_to_position():
    seeds, starts = np.array([5, 2**63, 9], dtype=np.uint64), np.array([0, 70, 3])
    ahead = Uniforms(seeds, starts, torch.device("cpu"))
    for step in range(2 * AHEAD + 3):
        assert torch.equal(ahead.next(), uniforms(seeds, starts + step))


def test_top_k_and_top_p_restrict_what_is_drawn_not_its_logprob():
    draws = uniforms(np.arange(DRAWS), np.zeros(DRAWS))
    whole = torch.log_softmax(LOGITS, -1)
    for cut, allowed in (({"top_k": 3}, {0, 7, 3}), ({"top_p": 0.6}, {0, 7}), ({"top_p": 0.999, "top_k": 1}, {0})):
        ids, logprobs = draw(draws, 1.0, **cut)
        assert set(ids.tolist()) == allowed
        torch.testing.assert_close(logprobs, whole[ids])
        kept = sorted(allowed)
        counts, share = np.bincount(ids, minlength=8)[kept], whole.exp().double().numpy()[kept]
        assert chi_square(counts, share / share.sum()) < CHI_SQUARE_7


def test_top_p_0_is_greedy_and_always_leaves_a_token():
    ids, _ = draw(uniforms(np.arange(99), np.zeros(99)), 1.0, top_p=0.0)
    assert set(ids.tolist()) == {0}


def test_temperature_0_takes_the_best_and_reports_it_at_temperature_1():
    ids, logprobs = draw(uniforms(np.arange(99), np.zeros(99)), 0.0)
    assert set(ids.tolist()) == {0}
    torch.testing.assert_close(logprobs, torch.log_softmax(LOGITS, -1)[ids])


def test_a_row_does_not_notice_how_its_neighbours_sample():
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(200, 500, generator=generator) * 4
    draws = torch.rand(200, generator=generator, dtype=torch.float64)
    alone = sample(rows, SamplingRows.of([SamplingParams()] * 200), draws)
    params = [
        SamplingParams(temperature=float(i % 2), top_p=1.0 if i % 4 else 0.5, top_k=-1 if i % 6 else 2)
        for i in range(200)
    ]
    together = sample(rows, SamplingRows.of(params), draws)
    for mine, ours in zip(alone, together, strict=True):
        assert torch.equal(mine[1::2], ours[1::2])


def test_a_row_that_does_not_cut_keeps_its_tail_beside_one_that_does():
    """In float32 the likely token alone has all of the probability; the tail must stay possible."""
    rows = torch.tensor([[30.0] + [0.0] * 50, [0.0] * 51])
    draws = torch.tensor([1 - 1e-12, 0.5], dtype=torch.float64)
    plain = SamplingParams()
    alone, _ = sample(rows, SamplingRows.of([plain, plain]), draws)
    together, _ = sample(rows, SamplingRows.of([plain, SamplingParams(top_p=0.5)]), draws)
    assert alone[0] == together[0] > 0
