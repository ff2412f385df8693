"""One token per row: the right distribution, and a function of seed, position and distribution alone."""

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from mtrl.engines.base import SamplingParams
from mtrl.engines.local.sampling import (
    AHEAD,
    BLOCK,
    LARGE,
    SamplingRows,
    Uniforms,
    counter_uniform,
    drawn_at_once,
    drawn_in_blocks,
    sample,
    truncated,
)

LOGITS = torch.tensor([2.0, 0.0, -1.0, 1.0, -30.0, 0.5, -0.5, 1.5])
DRAWS = 20_000
CHI_SQUARE_7 = 29.9
"""Chi-square that a fair sample of eight classes exceeds once in ten thousand times (never with these fixed seeds)."""


def uniforms(seeds, positions):
    return torch.from_numpy(counter_uniform(np.asarray(seeds, dtype=np.uint64), np.asarray(positions)))


def chi_square(counts, probabilities):
    expected = probabilities * counts.sum()
    stored = expected > 1e-6
    assert not counts[~stored].any(), "what has no probability is never drawn"
    return ((counts - expected)[stored] ** 2 / expected[stored]).sum()


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


def test_neighbouring_streams_are_independent():
    """The tokens at two positions, or of two seeds, are independent."""
    first, second = uniforms(np.arange(DRAWS), np.full(DRAWS, 3)), uniforms(np.arange(DRAWS) + 1, np.full(DRAWS, 3))
    third = uniforms(np.arange(DRAWS), np.full(DRAWS, 4))
    for a, b in ((first, second), (first, third)):
        assert abs(np.corrcoef(a, b)[0, 1]) < 4 / DRAWS**0.5


def test_uniforms_are_below_one_and_take_large_seeds():
    values = uniforms([0, 2**64 - 1, 2**63], [0, 0, 2**31])
    assert ((values >= 0) & (values < 1)).all() and len(set(values.tolist())) == 3


def test_uniforms_continue_across_positions():
    seeds, starts = np.array([5, 2**63, 9], dtype=np.uint64), np.array([0, 70, 3])
    ahead = Uniforms(seeds, starts, torch.device("cpu"))
    for step in range(2 * AHEAD + 3):
        assert torch.equal(ahead.next(), uniforms(seeds, starts + step))


def test_top_k_and_top_p_restrict_tokens_and_not_logprobs():
    draws = uniforms(np.arange(DRAWS), np.zeros(DRAWS))
    whole = torch.log_softmax(LOGITS, -1)
    for cut, allowed in (({"top_k": 3}, {0, 7, 3}), ({"top_p": 0.6}, {0, 7}), ({"top_p": 0.999, "top_k": 1}, {0})):
        ids, logprobs = draw(draws, 1.0, **cut)
        assert set(ids.tolist()) == allowed
        torch.testing.assert_close(logprobs, whole[ids])
        stored = sorted(allowed)
        counts, share = np.bincount(ids, minlength=8)[stored], whole.exp().double().numpy()[stored]
        assert chi_square(counts, share / share.sum()) < CHI_SQUARE_7


CUTS = [
    *((0.8, 0.8, 20), (1.0, 0.5, 5), (0.6, 0.95, 20), (1.5, 0.9, 50), (0.3, 0.7, 3), (2.0, 0.3, 100)),
    *((1.0, 0.9, -1), (0.7, 1.0, 20), (1.0, 0.8, 300), (0.8, 0.01, 20), (1.0, 0.9, 1), (1.0, 0.9, 300)),
]
"""Temperature, top-p and top-k: some have only one limit, and some have a top-k above the vocabulary."""
VOCABULARY = 300


def warped(logits, temperature, top_p, top_k):
    """Return the distribution from which Hugging Face's `generate` samples."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k > 0:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    return torch.softmax(warpers(torch.zeros(len(logits), 1, dtype=torch.int64), logits), -1)


def random_logits(rows, seed=0):
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 2


def swept(logits, cuts, count=4000):
    """Return the histogram of the tokens that each row draws for `count` numbers spread evenly over [0, 1)."""
    params = [SamplingParams(temperature=t, top_p=p, top_k=k) for t, p, k in cuts]
    shares = torch.zeros_like(logits, dtype=torch.float64)
    for i in range(count):
        numbers = torch.full((len(logits),), (i + 0.5) / count, dtype=torch.float64)
        ids, _ = sample(logits, SamplingRows.of(params), numbers)
        shares[torch.arange(len(logits)), ids] += 1 / count
    return shares


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_top_k_and_top_p_combine_as_in_hugging_face(cut):
    """top-k comes first, and top-p uses the shares of the remaining tokens. The allowed tokens are the same."""
    temperature, top_p, top_k = cut
    logits = random_logits(200)
    probabilities = torch.softmax(logits / temperature, -1)
    rows = SamplingRows.of([SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k)] * len(logits))
    mine = truncated(probabilities, rows.top_p, rows.top_k)
    theirs = warped(logits, *cut)
    assert torch.equal(mine > 0, theirs > 0)
    torch.testing.assert_close(mine / mine.sum(-1, keepdim=True), theirs)


def test_samples_follow_the_distribution_of_hugging_face():
    """`sample` gets rows with different limits in one batch."""
    logits = random_logits(len(CUTS), seed=1)
    shares = swept(logits, CUTS)
    for row, cut in enumerate(CUTS):
        theirs = warped(logits[row : row + 1], *cut)[0].double()
        assert not shares[row][theirs == 0].any(), "nothing that they would not draw"
        assert (shares[row] - theirs).abs().max() < 2 / 4000


def test_top_p_applies_to_the_mass_that_top_k_leaves():
    """Top-k leaves 4/7 and 3/7 of the probabilities 0.4, 0.3, 0.2, 0.1; 4/7 is more than top_p=0.5, and 0.4 is less."""
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()[None]
    params = SamplingParams(temperature=1.0, top_p=0.5, top_k=2)
    numbers = torch.linspace(0, 1 - 1e-9, 50, dtype=torch.float64)
    drawn = {sample(logits, SamplingRows.of([params]), number[None])[0].item() for number in numbers}
    assert drawn == {0}


def test_top_p_0_is_greedy():
    ids, _ = draw(uniforms(np.arange(99), np.zeros(99)), 1.0, top_p=0.0)
    assert set(ids.tolist()) == {0}


def test_temperature_0_is_greedy_with_logprobs_at_temperature_1():
    ids, logprobs = draw(uniforms(np.arange(99), np.zeros(99)), 0.0)
    assert set(ids.tolist()) == {0}
    torch.testing.assert_close(logprobs, torch.log_softmax(LOGITS, -1)[ids])


def test_rows_sample_independently_of_their_neighbours():
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


def test_top_p_of_one_row_does_not_change_another():
    """The random numbers are next to the boundaries between tokens, so that a changed bit would change a token."""
    logits, cut = random_logits(20, seed=2), SamplingParams(top_k=20)
    rows = SamplingRows.of([cut])
    for row in logits:
        ends = truncated(torch.log_softmax(row[None], -1).exp(), rows.top_p, rows.top_k).double().cumsum(-1)[0]
        for place in (ends / ends[-1]).unique()[:-1]:
            draws = torch.stack([place - 1e-10, torch.tensor(0.5, dtype=torch.float64)])
            alone, _ = sample(row[None], rows, draws[:1])
            beside, _ = sample(row.repeat(2, 1), SamplingRows.of([cut, SamplingParams(top_p=0.5)]), draws)
            assert alone[0] == beside[0]


def test_a_row_without_truncation_keeps_its_tail():
    """In float32 the likely token alone has all of the probability; the tail must stay possible."""
    rows = torch.tensor([[30.0] + [0.0] * 50, [0.0] * 51])
    draws = torch.tensor([1 - 1e-12, 0.5], dtype=torch.float64)
    plain = SamplingParams()
    alone, _ = sample(rows, SamplingRows.of([plain, plain]), draws)
    together, _ = sample(rows, SamplingRows.of([plain, SamplingParams(top_p=0.5)]), draws)
    assert alone[0] == together[0] > 0


@pytest.mark.parametrize("vocabulary", [BLOCK, 3 * BLOCK + 17, 2 * LARGE])
def test_draws_in_blocks_are_those_of_the_whole_distribution(vocabulary):
    generator = torch.Generator().manual_seed(vocabulary)
    weights = torch.randn(64, vocabulary, generator=generator).mul(4).softmax(-1)
    weights[:32] *= torch.rand(32, vocabulary, generator=generator) < 0.1  # as top-k leaves them
    weights[:8, vocabulary // 2 :] = 0
    draws = uniforms(np.arange(64), np.arange(64))
    draws[:3] = torch.tensor([0.0, 1 - 2.0**-53, 0.5], dtype=torch.float64)
    found = drawn_in_blocks(weights, draws)
    assert torch.equal(found, drawn_at_once(weights, draws)) and (weights.gather(1, found[:, None]) > 0).all()


def test_blocks_are_drawn_for_large_vocabularies_without_float64_numbers_for_all_tokens():
    """The tiny policy is below the limit, so that its runs keep their bits."""
    sizes = []

    class Watched(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            found = function(*args, **(kwargs or {}))
            if isinstance(found, torch.Tensor) and found.dtype == torch.float64:
                sizes.append(found.numel())
            return found

    draws, rows = uniforms(np.arange(4), np.arange(4)), SamplingRows.of([SamplingParams()] * 4)
    with Watched():
        sample(torch.zeros(4, LARGE), rows, draws)
    assert max(sizes) <= 4 * max(BLOCK, LARGE // BLOCK)
    sizes.clear()
    with Watched():
        sample(torch.zeros(4, LARGE - 1), rows, draws)
    assert max(sizes) == 4 * (LARGE - 1)
