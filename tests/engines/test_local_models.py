"""The local engine computes what the model computes, for every supported kind of model."""

import asyncio
import copy

import pytest
import torch
import transformers as hf

from mtrl.engines.base import SamplingParams
from mtrl.engines.local import fused
from mtrl.engines.local.engine import LocalEngine
from mtrl.engines.local.half import HalfRunner
from mtrl.engines.local.runner import HfRunner
from mtrl.errors import UserError
from mtrl.models.attention import ONEDNN
from mtrl.models.preparation import checkpoint_gradients
from mtrl.models.tiny import save
from mtrl.trainer.update.policy import Policy

VOCABULARY = 90
PROMPTS = [[1, 2, 3], [1, 2, 3], [7] * 21, [4, 9, 30, 31, 32], [60]]
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
GEMMA = {"head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8, "final_logit_softcapping": 5.0}
SLIDING = ["sliding_attention", "full_attention"]
MODELS = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES)),
    "llama with biases": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES, attention_bias=True)),
    "qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**SIZES)),
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True)),
    "gpt2": lambda: hf.GPT2LMHeadModel(
        hf.GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=128, initializer_range=0.3)
    ),
    "mistral, sliding": lambda: hf.MistralForCausalLM(hf.MistralConfig(**SIZES, sliding_window=8)),
    "qwen2, half sliding": lambda: hf.Qwen2ForCausalLM(
        hf.Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=8, layer_types=SLIDING)
    ),
    "gemma2, soft-capped": lambda: hf.Gemma2ForCausalLM(hf.Gemma2Config(**SIZES, **GEMMA, layer_types=SLIDING)),
    "gemma3": lambda: hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**SIZES, **GEMMA, layer_types=SLIDING)),
}
FUSED = ("llama", "llama with biases", "qwen2", "qwen3")


def build(name, seed=0):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = MODELS[name]().eval()
        for parameter in model.parameters():  # biases and norms start at 0 and 1, so give them distinct values
            if parameter.ndim == 1:
                torch.nn.init.normal_(parameter, mean=parameter.data.mean().item(), std=0.2)
    return model


@pytest.fixture(scope="module", params=MODELS)
def name(request):
    torch.set_num_threads(1)
    return request.param


@pytest.fixture(scope="module")
def pristine(name):
    """A model that no engine has changed."""
    return build(name)


@pytest.fixture(scope="module")
def model(pristine):
    return copy.deepcopy(pristine)


def full_logprobs(model, context, token_ids, temperature=1.0):
    """Return the log-probs of `token_ids` after `context`, by one forward pass over all tokens."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([context + token_ids])).logits[0, len(context) - 1 : -1].float()
    return torch.log_softmax(logits / temperature, -1).gather(-1, torch.tensor(token_ids)[:, None]).squeeze(-1)


def check_logprobs(model, prompts, sampled, contexts, temperature=1.0):
    for context, generation in contexts(prompts, sampled):
        expected = full_logprobs(model, context, generation.token_ids, temperature)
        torch.testing.assert_close(torch.tensor(generation.logprobs), expected, atol=1e-5, rtol=0)


def test_supported_models_use_the_fused_step(name, model):
    assert fused.supports(model) == (name in FUSED)


def test_logprobs_are_those_of_a_full_forward(pristine, model, sample_turns, contexts):
    """The turns keep their cache, and are longer than a sliding window."""
    engine = LocalEngine(model, None, max_context_length=128)
    sampled = sample_turns(engine, PROMPTS, sampling=SamplingParams(max_generate_length=9, temperature=1.3))
    check_logprobs(pristine, PROMPTS, sampled, contexts, 1.3)
    assert max(len(context) for context, _ in contexts(PROMPTS, sampled)) > 30
    assert engine.stats.cached_tokens > engine.stats.prompt_tokens / 2, "or it was not the cache that was tested"


def test_models_that_recompute_activations_are_sampled(name, sample_turns):
    recomputing = build(name)
    checkpoint_gradients(recomputing)
    training = {module for module in recomputing.modules() if module.training}
    sampling = SamplingParams(max_generate_length=9, temperature=1.0)
    sampled, plain = (
        sample_turns(LocalEngine(model, None, max_context_length=128), PROMPTS, sampling=sampling)
        for model in (recomputing, build(name))
    )
    assert sampled == plain
    assert {module for module in recomputing.modules() if module.training} == training


def test_fused_and_plain_steps_sample_the_same(name, model, sample_turns):
    fast, slow = (LocalEngine(model, None, max_context_length=128, fused_decode=fuse) for fuse in (True, False))
    assert isinstance(slow.runner, HfRunner) and isinstance(fast.runner, HfRunner) == (name not in FUSED)
    one, other = sample_turns(fast, PROMPTS), sample_turns(slow, PROMPTS)
    for i in one:
        for mine, theirs in zip(one[i], other[i], strict=True):
            assert mine.token_ids == theirs.token_ids
            assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-5)


def test_greedy_turns_equal_those_of_generate(pristine, model, sample_turns):
    engine = LocalEngine(model, None, max_context_length=128)
    sampled = sample_turns(engine, PROMPTS, turns=1, sampling=SamplingParams(max_generate_length=12, temperature=0.0))
    for i, prompt in enumerate(PROMPTS):
        expected = pristine.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)[0, len(prompt) :]
        assert sampled[i][0].token_ids == expected.tolist()


@pytest.mark.parametrize("name", ["llama", "gemma2, soft-capped", "mistral, sliding"], indirect=True)
def test_logprobs_with_eager_attention(name, sample_turns, contexts):
    model = build(name)
    model.set_attn_implementation("eager")
    pristine = copy.deepcopy(model)
    sampled = sample_turns(LocalEngine(model, None, max_context_length=128, fused_decode=False), PROMPTS)
    check_logprobs(pristine, PROMPTS, sampled, contexts)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
@pytest.mark.parametrize("name", ["llama", "gpt2"], indirect=True)
@pytest.mark.parametrize("fuse", [True, False])
def test_gradient_checkpointing_does_not_switch_the_cache_off(name, fuse, sample_turns, contexts):
    model = build(name)
    pristine = copy.deepcopy(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.eval()
    modes = [module.training for module in model.modules()]
    sampled = sample_turns(LocalEngine(model, None, max_context_length=128, fused_decode=fuse), PROMPTS)
    check_logprobs(pristine, PROMPTS, sampled, contexts)
    assert [module.training for module in model.modules()] == modes


@pytest.mark.parametrize("name", ["gpt2", "llama"], indirect=True)
def test_padding_may_reach_past_the_last_position(name, pristine, model, sample_turns, contexts):
    """A long conversation continues with a new long prompt in the batch; together they are wider than the positions."""
    engine = LocalEngine(model, None, max_context_length=128)
    sampling = SamplingParams(max_generate_length=3)

    async def both():
        first = await engine.generate("0", [3] * 100, sampling)
        prompts = [[3] * 100 + first.token_ids + [5] * 20, [4] * 90]
        engine.open("1")
        return prompts, await asyncio.gather(*(engine.generate(str(i), p, sampling) for i, p in enumerate(prompts)))

    prompts, sampled = asyncio.run(both())
    assert engine.stats.cached_tokens >= 100
    check_logprobs(pristine, prompts, [[generation] for generation in sampled], contexts)


def test_prefill_in_several_passes(name, pristine, model, sample_turns, contexts, monkeypatch):
    monkeypatch.setattr("mtrl.engines.local.prefill.PREFILL_TOKENS", 24)
    sampled = sample_turns(LocalEngine(model, None, max_context_length=128), PROMPTS)
    check_logprobs(pristine, PROMPTS, sampled, contexts)


# -- half precision on a CPU ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FUSED, indirect=True)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_half_precision_is_more_exact_than_the_module(pristine, dtype, sample_turns, contexts):
    """The truth is float32 with the same weights, which are rounded already."""
    module = copy.deepcopy(pristine).to(dtype)
    exact = copy.deepcopy(module).float()
    engine = LocalEngine(copy.deepcopy(module), None, max_context_length=128)
    assert type(engine.runner) is HalfRunner and engine.runner.cache.dtype == dtype
    sampled = sample_turns(engine, PROMPTS, turns=4, sampling=SamplingParams(max_generate_length=9))
    assert engine.stats.cached_tokens > engine.stats.prompt_tokens / 2
    own, modules = [], []
    for context, generation in contexts(PROMPTS, sampled):
        truth = full_logprobs(exact, context, generation.token_ids)
        own.append(torch.tensor(generation.logprobs) - truth)
        modules.append(full_logprobs(module, context, generation.token_ids) - truth)
    assert 0 < torch.cat(own).abs().mean() < torch.cat(modules).abs().mean() < 0.2


def test_other_models_sample_in_the_precision_of_their_weights():
    assert isinstance(LocalEngine(build("gpt2").bfloat16(), None).runner, HfRunner)


# -- matrices packed by oneDNN ----------------------------------------------------------------------------------------


@pytest.mark.skipif(not (torch.backends.mkl.is_available() and ONEDNN), reason="this PyTorch has no MKL, or no oneDNN")
@pytest.mark.parametrize("name", FUSED, indirect=True)
def test_packed_matrices_give_the_logprobs_of_the_model(pristine, model, sample_turns, contexts, monkeypatch):
    monkeypatch.setattr(fused, "LARGE", 2000)
    engine = LocalEngine(model, None, max_context_length=128)
    packed, refresh = [], engine.runner.refresh
    monkeypatch.setattr(engine.runner, "refresh", lambda: packed.append(len(engine.runner.packed)) or refresh())
    sampled = sample_turns(engine, PROMPTS)
    assert 0 < max(packed) < 4 * 2 + 1, "the large ones"
    check_logprobs(pristine, PROMPTS, sampled, contexts)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "sent"])
def test_new_weights_are_packed_again(shared, dtype, sample_turns, monkeypatch):
    monkeypatch.setattr(fused, "LARGE", 1)
    old, new = (build("qwen3", seed).to(dtype) for seed in (0, 1))
    expected = sample_turns(LocalEngine(copy.deepcopy(new), None, max_context_length=128), PROMPTS)
    engine = LocalEngine(old, None, max_context_length=128)
    assert sample_turns(engine, PROMPTS) != expected
    if shared:
        with torch.no_grad():
            for mine, theirs in zip(old.parameters(), new.parameters(), strict=True):
                mine.copy_(theirs)
    asyncio.run(engine.load_weights(None if shared else new.state_dict(), 1))
    found = sample_turns(engine, PROMPTS)
    for i, generations in expected.items():
        assert [g.token_ids for g in found[i]] == [g.token_ids for g in generations]
        assert [g.logprobs for g in found[i]] == [g.logprobs for g in generations]


# -- shared and copied weights ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*FUSED, "gpt2"], indirect=True)
def test_an_update_in_place_needs_no_sync(name, sample_turns, contexts):
    model = build(name)
    engine = LocalEngine(model, None, max_context_length=128)
    before = sample_turns(engine, PROMPTS)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)), alpha=0.03)
    after = sample_turns(engine, PROMPTS)
    check_logprobs(model, PROMPTS, after, contexts)
    assert [g.token_ids for g in before[0]] != [g.token_ids for g in after[0]]


@pytest.mark.parametrize("name", ["qwen3", "llama with biases"], indirect=True)
def test_training_through_the_module_reaches_the_engine(name, sample_turns, contexts):
    model = build(name)
    engine = LocalEngine(model, None, max_context_length=128)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    ids = torch.arange(20)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    assert all(p.grad is not None for p in model.parameters())
    optimizer.step()
    sampled = sample_turns(engine, PROMPTS)
    check_logprobs(copy.deepcopy(model), PROMPTS, sampled, contexts)


@pytest.mark.parametrize("name", [*FUSED, "gpt2"], indirect=True)
def test_a_saved_model_loads_unchanged(name, pristine, tiny_tokenizer, tmp_path):
    model = copy.deepcopy(pristine)
    LocalEngine(model, tiny_tokenizer)
    policy = Policy(model, tiny_tokenizer)
    policy.export(tmp_path / "export")
    save(model, tiny_tokenizer, tmp_path / "saved")
    for folder in ("export", "saved"):
        again = hf.AutoModelForCausalLM.from_pretrained(tmp_path / folder)
        assert_same_weights(again, pristine)
    other = build(name, seed=1)
    LocalEngine(other, tiny_tokenizer)
    Policy(other, tiny_tokenizer).load(policy.state())
    assert_same_weights(other, pristine)
    storages = [value.untyped_storage() for value in policy.state().values()]
    assert all(s.nbytes() == v.nbytes for s, v in zip(storages, policy.state().values(), strict=True)), (
        "no hidden blocks"
    )


def assert_same_weights(model, expected):
    state = model.state_dict()
    assert state.keys() == expected.state_dict().keys()
    for key, value in expected.state_dict().items():
        assert torch.equal(state[key], value), key


# -- refused models ---------------------------------------------------------------------------------------------------


def test_alibi_needs_a_mask_of_another_shape():
    model = hf.BloomForCausalLM(hf.BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=1, n_head=4)).eval()
    with pytest.raises(UserError, match="generator.backend=local cannot run BloomForCausalLM .*use vllm or sglang"):
        LocalEngine(model, None)


def test_layers_with_other_caches_are_refused():
    config = hf.Qwen2Config(**SIZES, layer_types=["linear_attention", "full_attention"])
    model = build("qwen2")
    model.config.layer_types = config.layer_types
    with pytest.raises(UserError, match="linear_attention"):
        LocalEngine(model, None)


def test_a_model_whose_cache_changes_its_logits_is_refused():
    """The model ignores the mask that the cache needs, so that tokens attend to later ones."""

    def without_mask(model, args, kwargs):
        mask = kwargs.get("attention_mask")
        return args, kwargs if mask is None else {**kwargs, "attention_mask": torch.zeros_like(mask)}

    model = build("gpt2")
    model.register_forward_pre_hook(without_mask, with_kwargs=True)
    with pytest.raises(UserError, match="its logits change with the cache"):
        HfRunner(model)


def test_models_with_adapters_use_the_forward_of_the_module(sample_turns, contexts):
    class Adapter(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x) + 1.0

    model = build("llama")
    old = model.model.layers[0].self_attn.q_proj
    new = Adapter(old.in_features, old.out_features, bias=False)
    new.weight = old.weight
    model.model.layers[0].self_attn.q_proj = new
    assert not fused.supports(model)
    sampled = sample_turns(LocalEngine(model, None, max_context_length=128), PROMPTS)
    check_logprobs(model, PROMPTS, sampled, contexts)
