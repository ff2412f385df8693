"""Micro-batches: no sample is lost, budgets hold, and packed samples do not attend to each other."""

import copy
import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers as hf
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.modeling_flash_attention_utils import prepare_fa_kwargs_from_position_ids

from mtrl.config.schema import Config
from mtrl.models.preparation import prepare_packing
from mtrl.models.value_head import ValueModel
from mtrl.trainer.data.batching import PACKED, PADDED, SHARED, micro_batches
from mtrl.trainer.update.policy import Policy
from mtrl.trainer.update.value_learner import ValueLearner
from mtrl.types import Sample
from tests.small_models import SIZES

LAYOUTS = pytest.mark.parametrize("layout", [PADDED, PACKED], ids=["padded", "packed"])
SMALL = {"vocab_size": 90, "n_embd": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.3}
NO_ENDS = {"bos_token_id": None, "eos_token_id": None}
MODELS = {
    "rotary": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**SIZES, head_dim=16)),
    "learned positions": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**SMALL, **NO_ENDS, n_positions=64)),
    "sliding window": lambda: hf.MistralForCausalLM(hf.MistralConfig(**SIZES, sliding_window=5)),
}


def build(make, dtype=torch.float32, attention="sdpa"):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = make().eval().to(dtype)
    model.set_attn_implementation(attention)
    return model


@pytest.fixture(params=[(name, attention) for name in MODELS for attention in ("sdpa", "apart", "eager")], ids=" ".join)
def model(request):
    torch.set_num_threads(1)
    name, attention = request.param
    model = build(MODELS[name], attention="sdpa" if attention == "apart" else attention)
    if attention == "apart":
        prepare_packing(model)
    return model


def sample_of(rng, length, trajectory=("g", 0), vocabulary=90):
    """Return a sample of random tokens, about half of them sampled."""
    mask = rng.random(length) < 0.5
    mask[0], mask[-1] = False, True
    group_id, index = trajectory
    return Sample(
        token_ids=rng.integers(0, vocabulary, length).tolist(),
        loss_mask=mask.tolist(),
        logprobs=np.where(mask, -rng.random(length), 0.0).tolist(),
        advantages=np.where(mask, rng.normal(size=length), 0.0).tolist(),
        versions=np.where(mask, 0, -1).tolist(),
        turns=np.where(mask, 0, -1).tolist(),
        group_id=group_id,
        trajectory=index,
    )


def samples_of(lengths, seed=0):
    """Return one sample per trajectory."""
    rng = np.random.default_rng(seed)
    return [sample_of(rng, length, ("g", index)) for index, length in enumerate(lengths)]


def ones(samples):
    return [np.ones(len(sample.token_ids)) for sample in samples]


def plans(samples, max_tokens, **how):
    return [batch.rows for batch in micro_batches(samples, ones(samples), max_tokens, **how)]


def sampled(values, sample):
    return [value for value, chosen in zip(values, sample.loss_mask, strict=True) if chosen]


lengths = st.lists(st.integers(2, 20), min_size=1, max_size=20)
trajectories = st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 3)), min_size=20, max_size=20)
budgets = st.integers(1, 60)


@settings(max_examples=40, deadline=None)
@given(lengths, trajectories, budgets, st.sampled_from([PADDED, PACKED]), st.booleans())
def test_micro_batches_hold_every_sample_within_the_budget(lengths, trajectories, budget, layout, whole):
    rng = np.random.default_rng(len(lengths))
    samples = [sample_of(rng, length, owner) for length, owner in zip(lengths, trajectories, strict=False)]
    weights = [np.arange(len(s.token_ids), dtype=float) for s in samples]
    batches = micro_batches(samples, weights, budget, layout=layout, whole_trajectories=whole)
    assert sorted(row for batch in batches for row in batch.rows) == list(range(len(samples)))
    for batch in batches:
        chosen = [samples[row] for row in batch.rows]
        owners = [(s.group_id, s.trajectory) for s in chosen]
        assert batch.token_ids.numel() <= budget or len(set(owners) if whole else chosen) == 1
        assert batch.targets.tolist() == [i for s in chosen for i in sampled(s.token_ids, s)]
        for found, values in (
            (batch.rollout_logprobs, [s.logprobs for s in chosen]),
            (batch.advantages, [s.advantages for s in chosen]),
            (batch.weights, [weights[row] for row in batch.rows]),
        ):
            expected = [v for s, value in zip(chosen, values, strict=True) for v in sampled(value, s)]
            torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float32), atol=0, rtol=0)
        number = {owner: n for n, owner in enumerate(dict.fromkeys(owners))}
        assert batch.trajectory.tolist() == [
            number[owner] for s, owner in zip(chosen, owners, strict=True) for _ in range(s.action_tokens)
        ]


@settings(max_examples=40, deadline=None)
@given(lengths, trajectories, budgets, st.sampled_from([PADDED, PACKED]))
def test_whole_trajectories_are_in_one_micro_batch(lengths, trajectories, budget, layout):
    rng = np.random.default_rng(len(lengths))
    samples = [sample_of(rng, length, owner) for length, owner in zip(lengths, trajectories, strict=False)]
    found = plans(samples, budget, layout=layout, whole_trajectories=True)
    owners = [{(samples[row].group_id, samples[row].trajectory) for row in plan} for plan in found]
    assert all(not a & b for a, b in itertools.combinations(owners, 2))


@settings(deadline=None)
@given(lengths, budgets)
def test_the_order_of_padded_micro_batches_is_fixed(lengths, budget):
    """Sums of floats depend on their order, and weights of runs are compared bit for bit, so this order must not
    change."""
    samples, expected = samples_of(lengths), []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if expected and (len(expected[-1]) + 1) * lengths[expected[-1][0]] <= budget:
            expected[-1].append(index)
        else:
            expected.append([index])
    assert plans(samples, budget) == expected
    assert plans(samples, budget, whole_trajectories=True) == expected  # one sample per micro-batch


@settings(deadline=None)
@given(lengths, budgets)
def test_no_two_packs_fit_in_one(lengths, budget):
    sizes = [sum(lengths[row] for row in plan) for plan in plans(samples_of(lengths), budget, layout=PACKED)]
    assert all(a + b > budget for a, b in itertools.combinations(sizes, 2))


def test_packs_are_first_fit_decreasing():
    assert plans(samples_of([4, 8, 5, 4, 7, 2]), 10, layout=PACKED) == [[1, 5], [4], [2, 0], [3]]


@LAYOUTS
def test_a_trajectory_longer_than_the_budget_is_alone(layout):
    rng = np.random.default_rng(0)
    owners = [("g", 0), ("g", 1), ("g", 0), ("h", 0), ("g", 0)]
    samples = [sample_of(rng, 6, owner) for owner in owners]
    assert plans(samples, 12, layout=layout, whole_trajectories=True) == [[0, 2, 4], [1, 3]]
    assert plans(samples, 12, layout=layout) == [[0, 1], [2, 3], [4]]


@LAYOUTS
def test_gather_is_in_the_order_of_the_flat_tensors(layout):
    samples = samples_of([3, 9, 4, 9, 6])
    per_sample = [np.array(sampled(s.logprobs, s)) for s in samples]
    batches = micro_batches(samples, ones(samples), 15, layout=layout)
    assert len(batches) > 1
    for batch in batches:
        for values in (per_sample, [v.tolist() for v in per_sample], [torch.from_numpy(v) for v in per_sample]):
            assert torch.equal(batch.gather(values), batch.rollout_logprobs)
    assert batches[0].gather([torch.ones(s.action_tokens, requires_grad=True) for s in samples]).requires_grad


@LAYOUTS
def test_no_samples_give_no_micro_batch(layout):
    assert plans([], 9, layout=layout) == plans([], 9, layout=layout, whole_trajectories=True) == []


@LAYOUTS
def test_a_sampled_token_without_context_is_an_error(layout):
    samples = samples_of([4, 4])
    samples[1].loss_mask[0] = True
    with pytest.raises(AssertionError, match="needs context"):
        micro_batches(samples, ones(samples), 99, layout=layout)


def test_the_last_token_of_a_sample_does_not_predict_the_next_sample():
    samples = samples_of([5, 4, 7])
    (batch,) = micro_batches(samples, ones(samples), 99, layout=PACKED)
    ends = np.cumsum([len(samples[row].token_ids) for row in batch.rows])[:-1]
    assert batch.token_ids.shape == (1, 16) and batch.action_mask.shape == (1, 15)
    assert not batch.action_mask[0, ends - 1].any()
    assert batch.position_ids[0, ends].tolist() == [0, 0]


def test_variable_length_kernels_get_the_bounds_of_the_samples():
    """Flash attention runs only on GPUs; the test checks the bounds that Transformers derives from the positions."""
    samples = samples_of([5, 4, 7])
    (batch,) = micro_batches(samples, ones(samples), 99, layout=PACKED)
    (bounds, _), (longest, _) = prepare_fa_kwargs_from_position_ids(batch.inputs["position_ids"])
    assert bounds.tolist() == [0, 7, 12, 15] and longest == 7  # the model does not read the last token
    given = batch.flash_inputs
    assert torch.equal(given["cu_seq_lens_q"], bounds) and given["cu_seq_lens_q"].dtype == bounds.dtype
    assert given["cu_seq_lens_k"] is given["cu_seq_lens_q"] and given["max_length_q"] == given["max_length_k"] == 7
    (padded,) = micro_batches(samples, ones(samples), 99, layout=PADDED)
    assert padded.flash_inputs.keys() == {"input_ids"}


def test_packs_that_share_prefixes_have_no_bounds():
    prefix = list(range(80))
    samples = [replace(sample_of(np.random.default_rng(i), 90), token_ids=[*prefix, *range(i, i + 10)],
                       loss_mask=[False] * 81 + [True] * 9) for i in (0, 20)]  # fmt: skip
    (batch,) = micro_batches(samples, ones(samples), 999, layout=SHARED)
    assert batch.token_ids.shape[1] < 180 and batch.flash_inputs.keys() == {"input_ids", "position_ids"}


@pytest.mark.parametrize("kind", ["policy", "critic"])
def test_flash_kernels_get_the_bounds_in_every_layer(kind):
    """With all four arguments Transformers does not search the positions, which would wait for the GPU. In place of the
    kernel, which needs a GPU, attention is computed within the bounds."""
    calls = []

    def within_bounds(module, query, key, value, mask, *, scaling, cu_seq_lens_q, cu_seq_lens_k, **others):
        calls.append((mask, cu_seq_lens_q, cu_seq_lens_k, others["max_length_q"], others["max_length_k"]))
        parts = [
            torch.nn.functional.scaled_dot_product_attention(
                *(states[:, :, start:end] for states in (query, key, value)), is_causal=True, enable_gqa=True,
                scale=scaling,
            )
            for start, end in itertools.pairwise(cu_seq_lens_q.tolist())
        ]  # fmt: skip
        return torch.cat(parts, 2).transpose(1, 2), None

    hf.AttentionInterface.register("flash_test", within_bounds)
    hf.AttentionMaskInterface.register("flash_test", lambda *_, **__: None)
    model = build(MODELS["rotary"])
    samples = samples_of([9, 14, 3])
    (batch,) = micro_batches(samples, ones(samples), 999, layout=PACKED)
    (padded,) = micro_batches(samples, ones(samples), 999, layout=PADDED)
    critic = ValueLearner(Config(), ValueModel(model))
    torch.nn.init.ones_(critic.model.head.weight)
    policy = Policy(model, None)

    def forward(batch):
        return critic.values([batch])[0] if kind == "critic" else policy.logprobs(batch)[0]

    expected = dict(zip(padded.rows, forward(padded).split(tokens_of(padded, samples)), strict=True))
    model.config._attn_implementation = "flash_test"
    found = dict(zip(batch.rows, forward(batch).split(tokens_of(batch, samples)), strict=True))
    assert all(torch.allclose(found[row], expected[row], atol=1e-5) for row in range(3))
    assert len(calls) == model.config.num_hidden_layers
    assert all(call[0] is None and call[1] is call[2] is batch.boundaries for call in calls)
    assert {call[3:] for call in calls} == {(batch.longest, batch.longest)}


def tokens_of(batch, samples):
    return [samples[row].action_tokens for row in batch.rows]


@pytest.mark.parametrize("budget", [1, 25, 999])
@LAYOUTS
def test_log_probs_equal_those_of_a_plain_forward(layout, budget, model):
    """The expected log-probs come from a plain forward at the sampling temperature."""
    samples = samples_of([9, 14, 3, 11, 6, 2])
    policy = Policy(model, None, temperature=0.7)
    for batch in micro_batches(samples, ones(samples), budget, layout=layout):
        found, entropy = policy.logprobs(batch)
        expected, entropies = [], []
        for sample in (samples[row] for row in batch.rows):
            logps = (model(torch.tensor([sample.token_ids])).logits[0] / 0.7).log_softmax(-1)
            places = [place for place, trained in enumerate(sample.loss_mask) if trained]
            expected += [logps[place - 1, sample.token_ids[place]] for place in places]
            entropies += [-(logps[place - 1].exp() * logps[place - 1]).sum() for place in places]
        torch.testing.assert_close(found, torch.stack(expected), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(entropy, torch.stack(entropies), atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_packed_samples_do_not_see_each_other(model):
    samples = samples_of([9, 14, 3, 11])
    policy = Policy(model, None)
    (batch,) = micro_batches(samples, ones(samples), 99, layout=PACKED)
    before = policy.logprobs(batch)[0]
    owner = torch.cat([torch.full([samples[row].action_tokens], row) for row in batch.rows])
    for row in range(len(samples)):
        changed = copy.deepcopy(samples)
        changed[row].token_ids = [(token + 1) % 90 for token in samples[row].token_ids]
        (other,) = micro_batches(changed, ones(samples), 99, layout=PACKED)
        after = policy.logprobs(other)[0]
        assert torch.equal(before[owner != row], after[owner != row])
        assert (before != after)[owner == row].all()
