"""Adapters: the trained, the sampled and the exported policy are equal."""

import asyncio
import copy
import pickle
import sys
import warnings
import weakref
from dataclasses import replace
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from mtrl.config.model_schema import ModelConfig, TinyConfig
from mtrl.engines.base import SamplingParams
from mtrl.engines.local import fused
from mtrl.engines.local.engine import LocalEngine
from mtrl.errors import UserError
from mtrl.models.lora import (
    LoraWeights,
    adapter_state,
    add_adapters,
    merged_state_of,
    save_adapter,
    scaling_of,
    without_adapters,
)
from mtrl.models.preparation import checkpoint_gradients
from mtrl.models.tiny import make_model
from mtrl.trainer.update.policy import Policy
from tests.small_models import SIZES

LONGER = SIZES | {"max_position_embeddings": 128}
MODELS = {
    "llama with biases": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**LONGER, attention_bias=True)),
    "qwen3, tied": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**LONGER, head_dim=16, tie_word_embeddings=True)),
    "gemma2": lambda: hf.Gemma2ForCausalLM(
        hf.Gemma2Config(**LONGER, head_dim=8, sliding_window=8, query_pre_attn_scalar=8, final_logit_softcapping=5.0)
    ),
}
LORA = ModelConfig(lora_rank=4, lora_alpha=8)
PROMPTS = [[1, 2, 3], [7] * 21, [4, 9, 30, 31, 32], [60]]


def merged_state(module):
    """Return the state of the merged model, by the names of the plain model."""
    return merged_state_of(module.state_dict(), adapter_state(module), scaling_of(module))


def build(name="qwen3, tied", seed=0):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return MODELS[name]().eval()


def trained(model, seed=5, config=LORA):
    """Return `model` with adapters whose B is not 0."""
    adapted = add_adapters(model, config)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapter_state(adapted).items():
            if ".lora_B." in name:
                parameter.copy_(0.05 * torch.randn(parameter.shape, generator=draw))
    return adapted


def loaded(plain, adapted):
    """Load the adapters of `adapted` into the plain module, and return it."""
    LoraWeights.of(adapted)(plain, adapter_state(adapted))
    return plain


def copies(state):
    return {name: value.clone() for name, value in state.items()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def logits(model, ids=((3, 1, 4, 1, 5, 9, 2, 6),)):
    with torch.no_grad():
        return model(input_ids=torch.tensor(ids), use_cache=False).logits


def logprobs(model, context, token_ids):
    found = logits(model, [context + token_ids])[0, len(context) - 1 : -1].log_softmax(-1)
    return found.gather(-1, torch.tensor(token_ids)[:, None])[:, 0]


def test_only_adapters_are_trained_and_the_first_log_probs_equal_the_models():
    plain, before = build(), torch.random.get_rng_state()
    adapted = add_adapters(copy.deepcopy(plain), LORA, seed=3)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(logits(adapted), logits(plain))
    assert not any(module.training for module in adapted.modules())
    names = [name for name, p in adapted.named_parameters() if p.requires_grad]
    assert len(names) == 2 * 7 * 2
    assert all(".lora_" in name and "lm_head" not in name and "embed" not in name for name in names)
    adapted(input_ids=torch.tensor([[1, 2, 3]])).logits.square().sum().backward()
    assert [name for name, p in adapted.named_parameters() if p.grad is not None] == names


def test_adapters_depend_only_on_the_seed():
    one = adapter_state(add_adapters(build(), LORA, seed=3))
    torch.rand(7)
    assert same(one, adapter_state(add_adapters(build(), LORA, seed=3)))
    other = adapter_state(add_adapters(build(), LORA, seed=4))
    assert not any(torch.equal(one[name], other[name]) for name in one if ".lora_A." in name)


def test_only_the_target_modules_get_adapters():
    config = ModelConfig(lora_rank=4, lora_target_modules=["q_proj", "mlp.down_proj"])
    found = {name.split(".lora_")[0].rpartition(".")[2] for name in adapter_state(add_adapters(build(), config))}
    assert found == {"q_proj", "down_proj"}


@pytest.mark.parametrize("target", ["qproj", "lm_head", "embed_tokens", "proj"])
def test_a_target_that_is_no_linear_layer_is_refused(target):
    config = ModelConfig(lora_rank=4, lora_target_modules=["q_proj", target])
    with pytest.raises(UserError, match=f"model.lora_target_modules={target} names no linear .* down_proj, gate_proj"):
        add_adapters(build(), config)


def test_a_model_without_linear_layers_is_refused():
    model = hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=2))
    with pytest.raises(UserError, match="lora_rank=4 finds no linear layers in GPT2LMHeadModel to adapt; set it to 0"):
        add_adapters(model, LORA)


def test_missing_peft_is_a_user_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UserError, match=r"peft is not installed; install it with: pip install 'mtrl-agents\[lora\]'"):
        add_adapters(build(), LORA)


def test_a_rank_above_that_of_the_matrices_is_refused(tiny_tokenizer):
    """R018: the matrices of the tiny policy have rank 128, so that the ranks 64 and 128 work and 256 is refused."""
    model = make_model(TinyConfig(layers=1), tiny_tokenizer, 0).eval()
    for rank in (64, 128):
        adapted = trained(copy.deepcopy(model), config=ModelConfig(lora_rank=rank, lora_alpha=2 * rank))
        assert scaling_of(adapted) == 2.0
        torch.testing.assert_close(logits(adapted), logits(loaded(copy.deepcopy(model), adapted)), atol=2e-4, rtol=0)
    with pytest.raises(UserError, match="lora_rank=256 is more than the rank 128 .* take at most 128, or .*rank=0"):
        add_adapters(model, ModelConfig(lora_rank=256))


def sampled(engine, prompts, sampling):
    """Return the generations of the engine for these prompts, which are requested at once."""

    async def one(i, prompt):
        engine.open(str(i))
        generation = await engine.generate(str(i), prompt, replace(sampling, seed=i))
        engine.release(str(i))
        return generation

    async def all_of_them():
        found = await asyncio.gather(*(one(i, prompt) for i, prompt in enumerate(prompts)))
        await engine.close()
        return found

    return asyncio.run(asyncio.wait_for(all_of_them(), 60))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("fused_decode", [True, False])
def test_an_engine_samples_from_the_trained_policy(name, fused_decode, tiny_tokenizer):
    """The log-probs of an engine with loaded adapters equal those of the module of peft."""
    plain = build(name)
    engine = LocalEngine(plain, tiny_tokenizer, max_context_length=128, fused_decode=fused_decode)
    assert isinstance(engine.runner, fused.FusedRunner) == (fused_decode and name != "gemma2")
    adapted = trained(build(name))
    loaded(plain, adapted)
    far = 0.0
    for context, generation in zip(PROMPTS, sampled(engine, PROMPTS, SamplingParams(12)), strict=True):
        found = torch.tensor(generation.logprobs)
        torch.testing.assert_close(found, logprobs(adapted, context, generation.token_ids), atol=1e-4, rtol=0)
        far = max(far, (found - logprobs(build(name), context, generation.token_ids)).abs().max().item())
    assert far > 0.01  # the log-probs before training differ


def test_every_adapted_matrix_changes_and_nothing_else():
    plain = build()
    before = copies(plain.state_dict())
    changed = {
        n for n, value in loaded(plain, trained(build())).state_dict().items() if not torch.equal(value, before[n])
    }
    assert changed == {name for name in before if name.endswith("_proj.weight")}
    assert plain.lm_head.weight is plain.model.embed_tokens.weight


def test_weights_do_not_drift_over_a_hundred_loads():
    plain, adapted = build(), trained(build())
    weights, first = LoraWeights.of(adapted), copies(adapter_state(adapted))
    second = {name: -2 * value for name, value in first.items()}
    pointers = [p.data_ptr() for p in plain.parameters()]
    weights(plain, first)
    once = copies(plain.state_dict())
    for _ in range(50):
        weights(plain, second)
        assert not same(once, plain.state_dict())
        weights(plain, first)
    assert same(once, plain.state_dict())
    assert pointers == [p.data_ptr() for p in plain.parameters()]
    weights(plain, {name: torch.zeros_like(value) for name, value in first.items()})
    assert same(plain.state_dict(), build().state_dict())


@settings(max_examples=30, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 5)),
    scaling=st.floats(-4, 4),
    loads=st.lists(st.integers(0, 5), min_size=1, max_size=6),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
)
@pytest.mark.filterwarnings("ignore:the engine's")
def test_a_load_depends_only_on_the_last_adapters(shape, scaling, loads, dtype):
    outputs, inputs, rank = shape

    def draw(seed, *size):
        return torch.randn(*size, generator=torch.Generator().manual_seed(seed))

    module = torch.nn.ModuleDict({"layer": torch.nn.Linear(inputs, outputs, dtype=dtype)})
    with torch.no_grad():
        module["layer"].weight.copy_(draw(99, outputs, inputs))
    first = module["layer"].weight.detach().clone()
    weights = LoraWeights(scaling, ("layer",))
    for seed in loads:
        a, b = draw(2 * seed, rank, inputs), draw(2 * seed + 1, outputs, rank)
        weights(module, {"layer.lora_A.weight": a, "layer.lora_B.weight": b})
    expected = (first.double() + scaling * (b.double() @ a.double())).to(dtype)
    torch.testing.assert_close(module["layer"].weight.detach(), expected)
    fresh = LoraWeights(scaling, ("layer",), {"layer": first})
    bits = module["layer"].weight.detach().clone()
    fresh(module, {"layer.lora_A.weight": a, "layer.lora_B.weight": b})
    assert torch.equal(bits, module["layer"].weight)


def without(state, part):
    return {name: value for name, value in state.items() if part not in name}


LAST = "layers.1.mlp.down_proj"


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda state: without(state, "layers.1"), "came for 7 of 14 adapted matrices and for 0 others"),
        (lambda state: {}, "came for 0 of 14"),
        (lambda state: without(state, f"{LAST}.lora_B"), f"{LAST} came without its other half"),
        (
            lambda state: {name.replace(LAST, "layers.2.mlp.down_proj"): value for name, value in state.items()},
            r"13 of 14 adapted matrices and for 1 others, among them model.layers.1.mlp.down_proj",
        ),
        (lambda state: {**state, "model.norm.weight": torch.ones(2)}, "model.norm.weight is no adapter"),
        (
            lambda state: {name: value[:, :5] if f"{LAST}.lora_A" in name else value for name, value in state.items()},
            r"down_proj has the shape \(32, 4\) x \(4, 5\) and its matrix \(32, 48\)",
        ),
    ],
)
def test_adapters_that_do_not_fit_change_nothing(spoil, message):
    """In another project, 0 of 399 tensors were adapters, and rollouts sampled the initial policy for two months."""
    plain, adapted = build(), trained(build())
    before = copies(plain.state_dict())
    with pytest.raises(ValueError, match=message):
        LoraWeights.of(adapted)(plain, spoil(adapter_state(adapted)))
    assert same(before, plain.state_dict())


def test_adapters_of_a_missing_matrix_are_refused():
    adapted = trained(build("llama with biases"))
    with pytest.raises(ValueError, match=r"the adapter of model.layers.0.self_attn.q_proj has no matrix in Linear"):
        LoraWeights.of(adapted)(torch.nn.Linear(2, 2), adapter_state(adapted))
    with pytest.raises(ValueError, match="has no matrix among 0 weights"):
        merged_state_of({}, adapter_state(adapted), 1.0)


def test_the_base_weights_are_shared_with_the_trainer():
    adapted, plain = trained(build()), build()
    weights = LoraWeights.of(adapted)
    owned = {p.data_ptr() for p in adapted.parameters()}
    assert all(value.data_ptr() in owned for value in weights.base.values())
    sent = pickle.loads(ForkingPickler.dumps(weights))
    assert all(value.is_shared() for value in sent.base.values())
    assert all(weights.base[name].is_shared() for name in sent.base)  # the trainer's own moved
    sent(plain, adapter_state(adapted))
    assert same(plain.state_dict(), merged_state(adapted))
    assert same(pickle.loads(pickle.dumps(weights)).base, weights.base)


def test_an_engine_without_base_weights_stores_its_own():
    adapted, plain = trained(build()), build()
    weights = LoraWeights(scaling_of(adapted), LoraWeights.of(adapted).matrices)
    weights(plain, {name: 3 * value for name, value in adapter_state(adapted).items()})
    weights(plain, adapter_state(adapted))
    assert same(plain.state_dict(), merged_state(adapted))
    assert len(weights.base) == 14


def test_half_precision_warns_where_rounding_removes_the_whole_change():
    plain = build().to(torch.bfloat16)
    adapted = trained(copy.deepcopy(plain))
    state = adapter_state(adapted)
    assert {value.dtype for value in state.values()} == {torch.float32}
    assert {value.dtype for value in merged_state(adapted).values()} == {torch.bfloat16}
    torch.testing.assert_close(logits(adapted), logits(loaded(plain, adapted)), atol=0.1, rtol=0.05)
    weights = LoraWeights.of(adapted)
    little = {name: value * (1e-12 if ".lora_B." in name else 1) for name, value in state.items()}
    nothing = {name: value * (".lora_A." in name) for name, value in state.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        weights(plain, nothing)  # the adapters before the first update
        weights(plain, state)
    with pytest.warns(UserWarning, match="bfloat16 weights round the whole change of 14 of 14 adapted matrices away"):
        weights(plain, little)


def test_the_export_equals_the_policy(tmp_path, tiny_tokenizer):
    plain, adapted = build(), trained(build())
    state = merged_state(adapted)
    assert same(state, loaded(plain, adapted).state_dict())
    gathered = {name: value.clone() for name, value in adapted.state_dict().items()}
    assert same(state, merged_state_of(gathered, adapter_state(adapted), scaling_of(adapted)))
    assert same(state, merged_state_of(build().state_dict(), adapter_state(adapted), scaling_of(adapted)))
    adapted.get_base_model().save_pretrained(tmp_path, state_dict={k: v.clone() for k, v in state.items()})
    again = hf.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert type(again) is type(plain)
    assert torch.equal(logits(again), logits(plain))


@pytest.mark.parametrize("gathered", [False, True])
def test_peft_loads_the_adapter_folder(tmp_path, gathered):
    from peft import PeftModel

    adapted = trained(build())
    if gathered:
        save_adapter(add_adapters(build(), LORA), tmp_path, copies(adapter_state(adapted)))
    else:
        save_adapter(adapted, tmp_path)
    assert len(load_file(tmp_path / "adapter_model.safetensors")) == 28
    again = PeftModel.from_pretrained(build(), str(tmp_path)).eval()
    assert torch.equal(logits(again), logits(adapted))


def test_adapters_are_restored_from_a_file(tmp_path):
    adapted, other = trained(build()), add_adapters(build(), LORA, seed=9)
    save_file(copies(adapter_state(adapted)), tmp_path / "adapters.safetensors")
    missing, unexpected = other.load_state_dict(load_file(tmp_path / "adapters.safetensors"), strict=False)
    assert not unexpected and not any(".lora_" in name for name in missing)
    assert same(adapter_state(adapted), adapter_state(other))
    assert torch.equal(logits(other), logits(adapted))


def test_the_reference_is_the_model_before_training():
    adapted, plain = trained(build()), build()
    with without_adapters(adapted):
        assert torch.equal(logits(adapted), logits(plain))
        assert len(adapter_state(adapted)) == 28  # the adapters are still the trained parameters
        with without_adapters(adapted):
            pass
        assert torch.equal(logits(adapted), logits(plain))
    assert torch.equal(logits(adapted), logits(trained(build())))
    with pytest.raises(RuntimeError), without_adapters(adapted):
        raise RuntimeError
    assert torch.equal(logits(adapted), logits(trained(build())))
    with pytest.raises(ValueError, match="has no adapters to leave out"), without_adapters(plain):
        pass


def test_a_module_that_trains_more_than_adapters_is_refused():
    with pytest.raises(ValueError, match=r"trains model.embed_tokens.weight, and no adapters alone"):
        adapter_state(build())
    with pytest.raises(ValueError, match="trains nothing"):
        adapter_state(build().requires_grad_(False))


def test_training_changes_only_the_adapters():
    adapted, plain = add_adapters(build(), LORA), build()
    ids = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(12):
        loss = F.cross_entropy(adapted(input_ids=ids).logits[0, :-1], ids[0, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    with without_adapters(adapted):
        assert torch.equal(logits(adapted), logits(plain))
    torch.testing.assert_close(logits(loaded(plain, adapted)), logits(adapted), atol=1e-4, rtol=1e-4)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
def test_recomputed_activations_give_the_same_gradients():
    plain, before, after = trained(build()), build(), trained(build())
    checkpoint_gradients(before, offload=True)
    before = trained(before)
    checkpoint_gradients(after)
    found = []
    for adapted in (plain, before, after):
        passes = []
        adapted.get_base_model().model.layers[0].self_attn.register_forward_hook(lambda *_, to=passes: to.append(1))
        adapted(input_ids=torch.tensor([[3, 1, 4, 1, 5]]), use_cache=False).logits.square().sum().backward()
        assert len(passes) == (1 if adapted is plain else 2)
        found.append({name: p.grad for name, p in adapted.named_parameters() if p.requires_grad})
    assert same(found[0], found[1]) and same(found[0], found[2])


def test_an_engine_loads_the_adapters_of_the_policy(tiny_tokenizer):
    """An engine samples greedily from its first policy, and after an update from the second."""
    adapted, greedy = trained(build()), SamplingParams(8, temperature=0.0)
    engine = LocalEngine(build(), tiny_tokenizer, max_context_length=128, apply_weights=LoraWeights.of(adapted))
    sampled_ids = []
    for model in (build(), adapted):
        generation = sampled(engine, PROMPTS[:1], greedy)[0]
        best = logits(model, [[*PROMPTS[0], *generation.token_ids]])[0, len(PROMPTS[0]) - 1 : -1].argmax(-1)
        assert best.tolist() == generation.token_ids
        sampled_ids.append(generation.token_ids)
        asyncio.run(engine.load_weights(Policy(adapted, tiny_tokenizer).weights(), 1))
    assert sampled_ids[0] != sampled_ids[1]


@pytest.mark.parametrize("targets", [[], ["mlp.gate_proj"], ["gate_proj", "up_proj", "down_proj"]])
def test_names_that_peft_takes_for_stacked_experts_are_refused_with_those_that_work(targets):
    """A dense layer beside layers with experts; with the proposed names there is an adapter for each linear layer."""
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "mlp_only_layers": [0]}
    model = hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**{**SIZES, "num_hidden_layers": 2}, **sizes))
    config = ModelConfig(lora_rank=2, lora_target_modules=targets)
    with pytest.raises(UserError, match="cannot have down_proj, gate_proj, up_proj in Qwen3MoeForCausalLM") as caught:
        add_adapters(copy.deepcopy(model), config)
    proposed = str(caught.value).partition("=[")[2].partition("]")[0].split(",")
    assert proposed == ["k_proj", "o_proj", "q_proj", "v_proj"]
    adapted = add_adapters(model, replace(config, lora_target_modules=proposed))
    assert len(adapter_state(adapted)) == 2 * 2 * 4


def test_a_matrix_is_freed_when_its_merged_copy_exists():
    adapted = trained(build())
    state = copies(adapted.state_dict())
    matrices = [weakref.ref(value) for name, value in state.items() if name.endswith(".base_layer.weight")]
    adapters = adapter_state(adapted)
    merged = merged_state_of(state, adapters, scaling_of(adapted))
    assert matrices and not any(matrix() is not None for matrix in matrices), "an export would hold the model twice"
    assert same(merged, merged_state(adapted)) and state.keys() == adapters.keys()
