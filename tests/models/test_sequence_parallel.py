"""Models whose ranks hold parts of the same sequences give the logits and gradients of one process, and models that
cannot be split are refused."""

import pytest
import torch
import torch.distributed as dist
import transformers as hf
from torch import nn

from mtrl.errors import UserError
from mtrl.models.preparation import prepare_parts
from mtrl.models.sequence_parallel import HeadExchange, SequenceGroup
from tests.distributed.ranks import run_ranks

RANKS, LENGTH = 3, 12
GROUP = pytest.mark.xdist_group("sequence_parallel_models")
NAMELESS = {"bos_token_id": None, "eos_token_id": None}
SIZES = {"vocab_size": 40, "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 6}
LATENT |= {"first_k_dense_replace": 2, **NAMELESS}
"""Settings of latent attention, without experts."""
MODELS = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES, num_attention_heads=6, num_key_value_heads=6)),
    "2 heads of keys": lambda: hf.Qwen3ForCausalLM(
        hf.Qwen3Config(**SIZES, num_attention_heads=6, num_key_value_heads=2, head_dim=4)
    ),
    "wider queries than values": lambda: hf.DeepseekV3ForCausalLM(
        hf.DeepseekV3Config(**SIZES, **LATENT, num_attention_heads=6, num_key_value_heads=6, max_position_embeddings=64)
    ),
    "learned positions": lambda: hf.GPT2LMHeadModel(
        hf.GPT2Config(**NAMELESS, vocab_size=40, n_positions=16, n_embd=24, n_layer=2, n_head=6)
    ),
}
ROWS = {
    "two rows": torch.arange(LENGTH).expand(2, -1),
    "pack": torch.cat([torch.arange(5), torch.arange(1), torch.arange(6)])[None],
    "pack with a shared prefix": torch.cat([torch.arange(7), torch.arange(4, 9)])[None],
}
"""Positions [B, L] of each kind of rows; samples begin and end within the parts of 4 tokens."""


def build(name):
    torch.manual_seed(0)
    model = MODELS[name]().eval().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    prepare_parts(model, RANKS)
    return model


def learn(model, positions, part=slice(None), **inputs):
    """Return the logits of a part of each row, and the gradients of a sum over them."""
    ids = torch.arange(positions.numel()).view(positions.shape) * 7 % 40
    model.zero_grad()
    logits = model(input_ids=ids[:, part], position_ids=positions[:, part], use_cache=False, **inputs).logits
    slopes = torch.arange(positions.numel() * 40).view(*positions.shape, 40).cos()
    (logits * slopes[:, part]).sum().backward()
    return logits.detach(), [parameter.grad for parameter in model.parameters()]


def on_a_rank(rank):
    group = SequenceGroup(dist.group.WORLD)
    part, found = slice(rank * LENGTH // RANKS, (rank + 1) * LENGTH // RANKS), {}
    for name in MODELS:
        model = build(name)
        for rows, positions in ROWS.items():
            logits, gradients = learn(model, positions, part, head_exchange=HeadExchange(group, positions))
            for gradient in gradients:
                dist.all_reduce(gradient)
            found[name, rows] = logits, [gradient.clone() for gradient in gradients]
    values, own = torch.tensor([rank, -rank], dtype=torch.float64, requires_grad=True), torch.arange(6) // 2 == rank
    joined = group.join(values, own)
    joined.backward(torch.arange(6.0).double())
    return found, joined.detach(), values.grad


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_ranks(RANKS, on_a_rank, tmp_path_factory.mktemp("ranks"))


@GROUP
@pytest.mark.parametrize("name", MODELS)
def test_parts_give_the_logits_and_gradients_of_the_whole(name, ranks):
    model = build(name)
    for rows, positions in ROWS.items():
        expected, gradients = learn(model, positions)
        torch.testing.assert_close(torch.cat([found[name, rows][0] for found, _, _ in ranks], 1), expected)
        for found, _, _ in ranks:
            torch.testing.assert_close(found[name, rows][1], gradients)


@GROUP
def test_joined_values_get_their_own_rows_of_the_gradient(ranks):
    for rank, (_, joined, gradient) in enumerate(ranks):
        assert joined.tolist() == [0, 0, 1, -1, 2, -2]
        assert gradient.tolist() == [2 * rank, 2 * rank + 1]


class Shifted(nn.Module):
    """A layer in which a token depends on the token before it."""

    def __init__(self, mlp):
        super().__init__()
        self.mlp = mlp

    def forward(self, states):
        return self.mlp(states) + nn.functional.pad(states, (0, 0, 1, 0))[:, :-1]


def with_shift(model):
    model.model.layers[1].mlp = Shifted(model.model.layers[1].mlp)


def without_arguments(model):
    """Let a layer pass only the arguments to attention that it knows."""
    attention = model.model.layers[0].self_attn
    forward = attention.forward
    attention.forward = lambda head_exchange=None, **known: forward(**known)


@pytest.mark.parametrize("change", [with_shift, without_arguments])
def test_models_whose_tokens_are_not_split_at_attention_are_refused(change):
    model = build("llama")
    change(model)
    with pytest.raises(UserError, match="sequence_parallel=2 splits sequences, and the tokens of LlamaForCausalLM"):
        prepare_parts(model, 2)


@pytest.mark.parametrize(
    ("name", "size", "attention", "message"),
    [
        ("llama", 4, "sdpa", "=4 does not divide the 6 attention heads of LlamaForCausalLM; use a divisor of 6"),
        ("llama", 2, "eager", "by sdpa in every layer, and LlamaForCausalLM has eager attention; set trainer.seq"),
        ("sliding", 2, "sdpa", "by sdpa in every layer, and MistralForCausalLM has layers of other kinds; set trainer"),
    ],
)
def test_heads_and_attention_are_checked(name, size, attention, message):
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    sliding = hf.MistralForCausalLM(hf.MistralConfig(**SIZES, **heads, sliding_window=8))
    model = MODELS[name]() if name in MODELS else sliding
    model.set_attn_implementation(attention)
    with pytest.raises(UserError) as error:
        prepare_parts(model, size)
    assert message in str(error.value)
