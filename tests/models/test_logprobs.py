"""Log-probs in chunks equal those of the plain formula, in values and gradients, for every kind of head."""

import copy

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers.modeling_outputs import CausalLMOutput

from mtrl.errors import UserError
from mtrl.models.logprobs import compiled_kernels, token_logprobs, top_logprobs
from mtrl.models.preparation import checkpoint_gradients

VOCABULARY = 61
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT = {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32, "bos_token_id": 1,
       "eos_token_id": 2}  # fmt: skip
KINDS = {
    "plain": ("Qwen3", SIZES | {"head_dim": 8, "tie_word_embeddings": False}),
    "tied": ("Qwen3", SIZES | {"head_dim": 8, "tie_word_embeddings": True}),
    "soft cap": ("Gemma2", SIZES | {"head_dim": 8, "final_logit_softcapping": 1.5}),
    "scale, tied": ("Cohere", SIZES | {"logit_scale": 0.5}),
    "divisor": ("Granite", SIZES | {"logits_scaling": 3.0}),
    "scale of the body": ("FalconH1", SIZES | {"lm_head_multiplier": 0.5, "mamba_d_ssm": 32, "mamba_n_heads": 4,
                                                    "mamba_d_state": 4}),
    "head with a bias": ("Phi", SIZES),
    "body that is no attribute of its own name": ("GPT2", GPT),
    "body inside of the body": ("OPT", {"vocab_size": VOCABULARY, "hidden_size": 16, "ffn_dim": 32,
                                        "num_hidden_layers": 1, "num_attention_heads": 2, "word_embed_proj_dim": 8,
                                        "max_position_embeddings": 32}),
    "experts": ("Mixtral", SIZES | {"num_local_experts": 2, "output_router_logits": True,
                                   "experts_implementation": "eager"}),
}  # fmt: skip


def make(kind, dtype=torch.float64):
    name, sizes = KINDS[kind]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**sizes)
    model = transformers.AutoModelForCausalLM.from_config(config).eval().to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)  # biases too, and logits that a soft cap bends
    return model


def make_batch(seed=0, rows=3, width=9, share=0.6):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (rows, width), generator=generator)
    mask = torch.rand(rows, width - 1, generator=generator) < share
    return ids, mask


def plain(model, ids, mask, temperature=1.0, entropy_gradient=True):
    """Return log-probs and entropies by the plain formulas, on the logits of all positions."""
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / (temperature or 1.0)
    whole = logits.log_softmax(-1)[mask]
    entropy = -(whole.exp() * whole).sum(-1)
    return whole.gather(-1, ids[:, 1:][mask][:, None])[:, 0], entropy if entropy_gradient else entropy.detach()


def ours(model, ids, mask, max_logits, **settings):
    return token_logprobs(
        model, mask, ids[:, 1:][mask], max_logits=max_logits, input_ids=ids[:, :-1], use_cache=False, **settings
    )


def gradients(model, found, seed=1):
    """Return the gradients of a weighted sum of log-probs and entropies, by name."""
    generator = torch.Generator().manual_seed(seed)
    loss = sum((torch.randn(len(f), generator=generator).to(f) * f).sum() for f in found)
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(expected, found, rounding):
    assert expected.keys() == found.keys()
    largest = max(gradient.abs().max() for gradient in expected.values())
    for name, gradient in expected.items():
        assert (gradient - found[name]).abs().max() <= rounding * largest, name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_chunks_do_not_change_values_or_gradients(kind, entropy_gradient):
    model, (ids, mask) = make(kind), make_batch()
    options = {"temperature": 0.7, "entropy_gradient": entropy_gradient}
    expected = plain(model, ids, mask, **options)
    found = ours(model, ids, mask, 4 * VOCABULARY, **options)
    assert found[1].requires_grad == entropy_gradient
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-11, atol=1e-11)
    assert_same(gradients(model, expected), gradients(model, found), 1e-11)


@pytest.mark.parametrize("candidates", [1, 3], ids=["one id", "several ids"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_compiled_kernels_give_the_same_values_and_gradients(dtype, candidates):
    model, (ids, mask) = make("plain", dtype), make_batch(share=1.0)
    targets = torch.stack([ids[:, 1:][mask], *torch.randint(3, VOCABULARY, (candidates - 1, int(mask.sum())))], 1)
    found = []
    for kernels in (None, compiled_kernels(backend="aot_eager")):
        model.zero_grad()
        inputs = {"input_ids": ids[:, :-1], "use_cache": False, "kernels": kernels}
        logprobs, entropy = token_logprobs(
            model, mask, targets, temperature=0.7, entropy_gradient=True, max_logits=5 * VOCABULARY, **inputs
        )
        (logprobs.sum() + 0.1 * entropy.sum()).backward()
        found.append([logprobs.detach(), entropy.detach(), *(p.grad for p in model.parameters())])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(other, one, rtol=2e-2 if dtype == torch.bfloat16 else 1e-4, atol=1e-5)


@given(
    seed=st.integers(0, 9),
    share=st.floats(0, 1),
    rows=st.integers(1, 30),
    temperature=st.sampled_from([0.0, 0.5, 1.0, 1.7]),
    entropy_gradient=st.booleans(),
    kind=st.sampled_from(["tied", "soft cap"]),
)
@settings(max_examples=40, deadline=None)
def test_values_and_gradients_agree_for_any_chunk_size_and_mask(seed, share, rows, temperature, entropy_gradient, kind):
    model, (ids, mask) = make(kind), make_batch(seed, share=share)
    options = {"temperature": temperature, "entropy_gradient": entropy_gradient}
    expected = plain(model, ids, mask, **options)
    found = ours(model, ids, mask, rows * VOCABULARY, **options)
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-11, atol=1e-11)
    assert_same(gradients(model, expected), gradients(model, found), 1e-11)


@pytest.mark.parametrize("rows", [4, 99])
def test_several_ids_at_each_position_and_the_most_probable_ones(rows):
    """Some ids of a position are equal, as the sampled token is often among the most probable ones."""
    model, (ids, mask) = make("soft cap"), make_batch()
    sizes = {"temperature": 0.7, "max_logits": rows * VOCABULARY, "input_ids": ids[:, :-1], "use_cache": False}
    targets = ids[:, 1:][mask]
    whole = (model(input_ids=ids[:, :-1], use_cache=False).logits[mask] / 0.7).log_softmax(-1)
    sampled, likely, top = top_logprobs(model, mask, targets, 3, **sizes)
    torch.testing.assert_close(sampled, whole.gather(1, targets[:, None])[:, 0])
    torch.testing.assert_close(top, whole.topk(3).values)
    assert torch.equal(likely, whole.topk(3).indices) and not top.requires_grad
    columns = torch.cat([targets[:, None], likely, likely[:, :1]], 1)
    found, entropy = token_logprobs(model, mask, columns, **sizes)
    torch.testing.assert_close(found, whole.gather(1, columns), rtol=1e-11, atol=1e-11)
    assert entropy.shape == targets.shape
    expected = gradients(model, [whole.gather(1, columns).flatten()])
    assert_same(expected, gradients(model, [found.flatten()]), 1e-11)


@pytest.mark.parametrize("kind", ["plain", "tied"])
def test_float32_chunks_agree_to_a_millionth(kind):
    model, (ids, mask) = make(kind, torch.float32), make_batch(rows=8, width=30)
    expected = ours(model, ids, mask, 2**27, entropy_gradient=True)
    found = ours(model, ids, mask, 7 * VOCABULARY, entropy_gradient=True)
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-6, atol=1e-6)
    assert_same(gradients(model, expected), gradients(model, found), 1e-6)


def test_logits_within_the_limit_give_the_bits_of_the_plain_formula():
    """Below the limit, results equal those of the plain formula bit for bit."""
    model, (ids, mask) = make("tied", torch.float32), make_batch()
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits[mask] / 0.7
    normaliser = torch.logsumexp(logits, -1)
    logprobs = logits.gather(-1, ids[:, 1:][mask][:, None]).squeeze(-1) - normaliser
    entropy = normaliser - (logits.softmax(-1) * logits).sum(-1)
    found = ours(model, ids, mask, int(mask.sum()) * VOCABULARY, temperature=0.7, entropy_gradient=True)
    assert torch.equal(logprobs, found[0])
    assert torch.equal(entropy, found[1])
    expected = gradients(model, (logprobs, entropy))
    found = gradients(model, found)
    assert all(torch.equal(gradient, found[name]) for name, gradient in expected.items())


def test_many_chunks_in_bfloat16_are_as_exact_as_one():
    """The sum over chunks is in float32, so more chunks add no error to the gradient of the head."""
    model, (ids, mask) = make("plain", torch.bfloat16), make_batch(rows=24, width=30)
    truth = copy.deepcopy(model).double()
    exact = gradients(truth, plain(truth, ids, mask))["lm_head.weight"]

    def error(found):
        return (gradients(model, found)["lm_head.weight"].double() - exact).norm() / exact.norm()

    naive = error(ours(model, ids, mask, 2**27, entropy_gradient=True))
    chunked = error(ours(model, ids, mask, 2 * VOCABULARY, entropy_gradient=True))
    assert 0 < naive < 0.1
    assert chunked < 1.2 * naive


def test_chunks_compute_in_the_dtype_of_autocast_forward_and_backward(tiny_model):
    """The backward pass is outside the context, and computes the logits again as they were."""
    ids = torch.randint(0, tiny_model.config.vocab_size, (1, 24), generator=torch.Generator().manual_seed(0))
    mask, dtypes = torch.ones(1, 23, dtype=torch.bool), []
    hook = tiny_model.get_output_embeddings().register_forward_hook(lambda _, __, output: dtypes.append(output.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        logprobs, _ = token_logprobs(
            tiny_model, mask, ids[0, 1:], max_logits=5 * tiny_model.config.vocab_size, input_ids=ids[:, :-1]
        )
    logprobs.sum().backward()
    hook.remove()
    tiny_model.zero_grad()
    assert set(dtypes) == {torch.bfloat16}


def test_an_empty_mask_gives_empty_values_and_zero_gradients():
    model, (ids, _) = make("tied"), make_batch()
    mask = torch.zeros(3, 8, dtype=torch.bool)
    logprobs, entropy = ours(model, ids, mask, 0, entropy_gradient=True)
    assert logprobs.shape == entropy.shape == (0,)
    found = gradients(model, (logprobs, entropy))
    assert found.keys() == dict(model.named_parameters()).keys()
    assert not any(gradient.any() for gradient in found.values())


def test_without_gradients_there_is_no_graph():
    model, (ids, mask) = make("plain"), make_batch()
    with torch.no_grad():
        found = ours(model, ids, mask, 4 * VOCABULARY, entropy_gradient=True)
    assert not found[0].requires_grad
    torch.testing.assert_close(found, plain(model, ids, mask), rtol=1e-11, atol=1e-11)


def test_the_root_and_its_layers_run_once(tiny_model):
    """The hooks of FSDP2 gather weights at these calls, whose number must be equal with and without chunks."""
    ids = torch.randint(0, 50, (2, 9))
    mask = torch.ones(2, 8, dtype=torch.bool)
    calls = {}
    for max_logits in (2**27, 400):
        with torch.no_grad():
            seen = calls.setdefault(max_logits, [])
            watched = (tiny_model, tiny_model.model, tiny_model.model.layers[1])
            handles = [m.register_forward_hook(lambda m, *_, to=seen: to.append(type(m).__name__)) for m in watched]
            ours(tiny_model, ids, mask, max_logits)
            for handle in handles:
                handle.remove()
    assert calls[2**27] == ["Qwen3DecoderLayer", "Qwen3Model", "Qwen3ForCausalLM"]
    layers = [name for name in calls[400] if name != "Qwen3Model"]  # FSDP2 registers no hook on the body
    assert layers == ["Qwen3DecoderLayer", "Qwen3ForCausalLM"]
    assert "forward" not in vars(tiny_model) and "forward" not in vars(tiny_model.model)


def test_chunks_work_with_gradient_checkpointing():
    model, (ids, mask) = make("plain"), make_batch()
    expected = gradients(model, plain(model, ids, mask))
    checkpoint_gradients(model)
    assert_same(expected, gradients(model, ours(model, ids, mask, 4 * VOCABULARY, entropy_gradient=True)), 1e-11)


@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], ["q_proj", "lm_head"]])
def test_only_adapters_get_gradients(targets):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False)
    model, (ids, mask) = peft.get_peft_model(make("plain"), config).double(), make_batch()
    expected = gradients(model, plain(model, ids, mask))
    assert all("lora_" in name for name in expected)
    assert_same(expected, gradients(model, ours(model, ids, mask, 4 * VOCABULARY, entropy_gradient=True)), 1e-11)


class Odd(nn.Module):
    """A custom model without a body that is separate from its head."""

    def __init__(self, heads=1):
        super().__init__()
        self.embedding, self.head, self.heads = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY), heads

    @property
    def base_model(self):
        return self

    def get_decoder(self):
        return self.embedding if self.heads > 1 else self

    def get_output_embeddings(self):
        return self.head

    def forward(self, input_ids, use_cache=None):
        states = self.embedding(input_ids)
        return CausalLMOutput(logits=sum(self.head(states) for _ in range(self.heads)))


@pytest.mark.parametrize("heads", [1, 2], ids=["no body", "a head that is called twice"])
def test_a_model_whose_head_cannot_be_separated_is_refused(heads):
    model, (ids, mask) = Odd(heads), make_batch()
    with pytest.raises(UserError, match=r"Odd does something .*raise trainer\.max_logits_per_chunk"):
        ours(model, ids, mask, 4 * VOCABULARY)
    assert "forward" not in vars(model)
    ours(model, ids, mask, 2**27)


class Fickle(Odd):
    """A model whose logits change from call to call."""

    calls = 0

    def get_decoder(self):
        return self.embedding

    def forward(self, input_ids, use_cache=None):
        self.calls += 1
        return CausalLMOutput(logits=self.head(self.embedding(input_ids)) * self.calls)


def test_a_model_whose_logits_change_between_calls_is_refused():
    model, (ids, mask) = Fickle(), make_batch()
    with pytest.raises(UserError, match="Fickle does something around its head"):
        ours(model, ids, mask, 4 * VOCABULARY)
