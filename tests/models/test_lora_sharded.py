"""Adapters under FSDP2 on two ranks over gloo give the same numbers as on one rank."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import distributed as dist
from torch.distributed import checkpoint
from torch.distributed.fsdp import fully_shard
from transformers import Qwen3Config, Qwen3ForCausalLM

from mtrl.config.model_schema import ModelConfig
from mtrl.models.lora import (
    LoraWeights,
    adapter_state,
    add_adapters,
    merged_state_of,
    plain_name,
    scaling_of,
    without_adapters,
)
from tests.distributed.ranks import run_ranks

RANKS = 2
DATA = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8, 1, 8]])
SIZES = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16}


def build(dtype=torch.float32):
    """Return a model, and a copy of it with adapters."""
    torch.manual_seed(0)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True}
    plain = Qwen3ForCausalLM(Qwen3Config(**SIZES, **heads, initializer_range=0.3)).eval().to(dtype)
    return plain, add_adapters(copy.deepcopy(plain), ModelConfig(lora_rank=5, lora_alpha=10))


def loss_of(model, row):
    """Return the loss; the reference is computed before, and between forward and backward, as in the trainer."""

    def reference():
        with torch.no_grad(), without_adapters(model):
            return model(input_ids=row[None], use_cache=False).logits

    first = reference()
    logits = model(input_ids=row[None], use_cache=False).logits
    second = reference()
    assert torch.equal(first, second)
    return F.cross_entropy(logits[0, :-1].float(), row[1:]) + 0.1 * (logits - second).float().square().mean()


def train(model, rows, steps=3):
    """Return the loss of each step; gradients are means over rows, like those of FSDP2 over ranks."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, foreach=False)
    losses = []
    for _ in range(steps):
        loss = torch.stack([loss_of(model, row) for row in rows]).mean()
        loss.backward()
        losses.append(loss.item())
        assert all(p.grad is not None and bool(p.grad.any()) for n, p in model.named_parameters() if ".lora_B." in n)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def whole(state):
    return {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in state.items()}


def on_a_rank(rank, folder):
    for reshard in (True, False):
        compare_with_one_rank(rank, folder / str(reshard), partial(shard, reshard))


def shard(reshard, model):
    for layer in model.base_model.model.model.layers:
        fully_shard(layer, reshard_after_forward=reshard)
    return fully_shard(model, reshard_after_forward=reshard)


def compare_with_one_rank(rank, folder, shard):
    plain, single = build()
    sharded = shard(copy.deepcopy(single))
    expected, found = train(single, DATA), torch.tensor(train(sharded, DATA[rank : rank + 1]))
    dist.all_reduce(found)
    torch.testing.assert_close(found / RANKS, torch.tensor(expected))
    adapters = whole(adapter_state(sharded))
    torch.testing.assert_close(adapters, dict(adapter_state(single)), atol=1e-5, rtol=1e-4)

    with torch.no_grad():
        trained = sharded(input_ids=DATA, use_cache=False).logits
        weights = LoraWeights.of(sharded)
        assert not weights.base and len(weights.matrices) == 14
        replica = copy.deepcopy(plain)
        weights(replica, adapters)
        torch.testing.assert_close(replica(input_ids=DATA).logits, trained, atol=1e-4, rtol=1e-4)
    exported = merged_state_of(whole(sharded.state_dict()), adapters, scaling_of(sharded))
    assert exported.keys() == plain.state_dict().keys()
    assert all(torch.equal(value, exported[name]) for name, value in replica.state_dict().items())
    frozen = whole({n: p for n, p in sharded.named_parameters() if not p.requires_grad})
    assert all(torch.equal(p, plain.get_parameter(plain_name(n))) for n, p in frozen.items())

    checkpoint.save(adapter_state(sharded), checkpoint_id=folder)
    again = shard(add_adapters(plain, ModelConfig(lora_rank=5, lora_alpha=10), seed=7))
    checkpoint.load(adapter_state(again), checkpoint_id=folder)  # in place
    with torch.no_grad():
        assert torch.equal(again(input_ids=DATA, use_cache=False).logits, trained)

    halves = shard(build(torch.bfloat16)[1])
    assert {p.dtype for p in halves.parameters() if p.requires_grad} == {torch.float32}
    train(halves, DATA[rank : rank + 1], steps=1)


@pytest.mark.slow
def test_two_ranks_train_the_same_adapters_as_one(tmp_path):
    """Weights are resharded after the forward pass in one case, and stay gathered in the other."""
    run_ranks(RANKS, on_a_rank, tmp_path, tmp_path)
