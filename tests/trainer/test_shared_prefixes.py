"""Packs with shared prefixes: the same log-probs and gradients as separate rows, with fewer tokens."""

from itertools import permutations

import numpy as np
import pytest
import torch
import transformers as hf
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mtrl.models.attention import Piece, pieces
from mtrl.models.packing import MIN_PREFIX
from mtrl.models.preparation import prepare_packing
from mtrl.trainer.data.batching import PACKED, PADDED, SHARED, cost, micro_batches, spans
from mtrl.trainer.flops import model_flops
from mtrl.trainer.throughput import trained
from mtrl.trainer.update.policy import Policy
from mtrl.types import Sample
from tests.small_models import SIZES

LONGER = SIZES | {"max_position_embeddings": 512}
MODELS = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**LONGER)),
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**LONGER, head_dim=16)),
    "gpt2": lambda: hf.GPT2LMHeadModel(
        hf.GPT2Config(vocab_size=90, n_embd=32, n_layer=2, n_head=4, n_positions=512, initializer_range=0.3)
    ),
}


def build(name, dtype=torch.float64):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = MODELS[name]().eval().to(dtype)
    prepare_packing(model)
    return model


def sample_of(rng, prompt, group, index):
    """Return a sample whose prompt is followed by random tokens, some of them sampled."""
    length = int(rng.integers(1, 30))
    mask = rng.random(length) < 0.6
    mask[-1] = True
    sampled = np.concatenate([np.zeros(len(prompt), dtype=bool), mask])
    tokens = [*prompt, *rng.integers(0, 90, length).tolist()]
    return Sample(
        token_ids=tokens,
        loss_mask=sampled.tolist(),
        logprobs=np.where(sampled, -rng.random(len(tokens)), 0.0).tolist(),
        advantages=np.where(sampled, rng.normal(size=len(tokens)), 0.0).tolist(),
        versions=np.where(sampled, 0, -1).tolist(),
        turns=np.where(sampled, 0, -1).tolist(),
        group_id=group,
        trajectory=index,
    )


def step_of(seed=0, system=80, question=70, groups=3, size=4):
    """Return the samples of some groups: one system message, a question per group, and a response per trajectory, in
    random order."""
    rng = np.random.default_rng(seed)
    common = rng.integers(0, 90, system).tolist()
    samples = []
    for group in range(groups):
        prompt = common + rng.integers(0, 90, question).tolist()
        samples += [sample_of(rng, prompt, f"g{group}", index) for index in range(size)]
    rng.shuffle(samples)
    return samples


def ones(samples):
    return [np.ones(len(sample.token_ids)) for sample in samples]


def results(model, samples, layout, max_tokens):
    """Return the log-probs of each sample, and the gradients of a loss over all of them."""
    model.zero_grad()
    policy, found = Policy(model, None), {}
    batches = micro_batches(samples, ones(samples), max_tokens, layout=layout)
    for batch in batches:
        logprobs, _ = policy.logprobs(batch)
        (logprobs.double() * batch.advantages).sum().backward()
        parts = logprobs.detach().split([samples[row].action_tokens for row in batch.rows])
        found.update(zip(batch.rows, parts, strict=True))
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    return [found[row] for row in range(len(samples))], gradients, batches


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("max_tokens", [300, 5000])
def test_logprobs_and_gradients_equal_those_of_separate_rows(name, max_tokens):
    model, samples = build(name), step_of()
    rows, row_gradients, _ = results(model, samples, PADDED, 5000)
    shared, gradients, batches = results(model, samples, SHARED, max_tokens)
    for one, other in zip(rows, shared, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)  # log-probs are float32
    for one, other in zip(row_gradients, gradients, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)  # norms are float32
    assert all(batch.token_ids.shape[1] <= max_tokens for batch in batches)


def test_a_wrong_context_would_be_noticed():
    """The log-probs depend on the prefix: with the prefix of another sample they differ."""
    model, samples = build("qwen3"), step_of()
    right, _, (batch,) = results(model, samples, SHARED, 5000)
    batch.token_ids[0, :5] = (batch.token_ids[0, :5] + 1) % 90
    wrong, _ = Policy(model, None).logprobs(batch)
    order = [right[row] for row in batch.rows]
    differences = (wrong.detach() - torch.cat(order)).abs().split([len(part) for part in order])
    assert all(difference.max() > 1e-4 for difference in differences)  # every sample attends to the first tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_dtypes_agree_up_to_their_rounding(dtype):
    samples = step_of()
    exact, _, _ = results(build("qwen3"), samples, PADDED, 5000)
    found, _, _ = results(build("qwen3", dtype), samples, SHARED, 5000)
    error = (torch.cat(found).double() - torch.cat(exact).double()).abs()
    assert error.mean() < 20 * torch.finfo(dtype).eps


def test_the_prompt_of_a_group_is_stored_once():
    samples = step_of(system=80, question=70, groups=3, size=4)
    (batch,) = micro_batches(samples, ones(samples), 5000, layout=SHARED)
    responses = sum(len(sample.token_ids) - 150 for sample in samples)
    own = len(samples) - 1  # the token before a first sampled token is each sample's own, if it is the prompt's last
    stored = batch.token_ids.shape[1]
    assert 80 + 3 * 70 + responses <= stored <= 80 + 3 * 70 + responses + own
    assert trained(model_flops(build("llama")), batch).tokens == sum(len(sample.token_ids) for sample in samples)


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 999),
    system=st.integers(1, 140),
    question=st.integers(1, 140),
    max_tokens=st.integers(50, 900),
)
def test_every_sampled_token_is_in_one_pack_after_its_context(seed, system, question, max_tokens):
    samples = step_of(seed, system, question, groups=2, size=3)
    # Samples that continue each other without a jump are one piece; random ends make this rare.
    ids_of = [sample.token_ids for sample in samples]
    assume(not any(a == b[: len(a)] for a, b in permutations(ids_of, 2)))
    rows = []
    for batch in micro_batches(samples, ones(samples), max_tokens, layout=SHARED):
        ids, mask = batch.token_ids[0], torch.cat([torch.tensor([False]), batch.action_mask[0]])
        parts = pieces(batch.position_ids)
        restored = [torch.cat([ids[part] for part in (*piece.context, piece.own)]).tolist() for piece in parts]
        assert restored == [samples[row].token_ids for row in batch.rows]
        for piece, row in zip(parts, batch.rows, strict=True):
            own = samples[row].loss_mask[len(samples[row].token_ids) - (piece.own.stop - piece.own.start) :]
            assert mask[piece.own].tolist() == own and sum(own) == samples[row].action_tokens
            assert not piece.context or sum(p.stop - p.start for p in piece.context) >= MIN_PREFIX
        rows += batch.rows
    assert sorted(rows) == list(range(len(samples)))


def test_pieces_continue_the_sample_before_them():
    positions = torch.tensor([[0, 1, 2, 3, 4, 2, 3, 4, 3, 1, 2, 0, 1]])
    assert pieces(positions) == [
        Piece(slice(0, 5), ()),
        Piece(slice(5, 8), (slice(0, 2),)),
        Piece(slice(8, 9), (slice(0, 2), slice(5, 6))),
        Piece(slice(9, 11), (slice(0, 1),)),
        Piece(slice(11, 13), ()),
    ]
    assert pieces(torch.arange(4).repeat(2, 1)) == []
    assert spans(positions) == ([0, 2, 3, 1, 0], [5, 5, 4, 3, 2])


def test_the_cost_counts_a_shared_prefix_once_and_attention_to_it_each_time():
    model, samples = model_flops(build("llama")), step_of(groups=1, size=2)
    (shared,) = micro_batches(samples, ones(samples), 5000, layout=SHARED)
    (whole,) = micro_batches(samples, ones(samples), 5000, layout=PACKED)
    saved = whole.token_ids.shape[1] - shared.token_ids.shape[1]
    assert saved in (149, 150)
    assert cost(whole, model) - cost(shared, model) == pytest.approx(model.training([saved], 0))
    assert trained(model, shared).flops == cost(shared, model)
