"""Tiny models and batches for tests of sharding: the same in every process."""

import random
from dataclasses import replace

import numpy as np
import torch
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from mtrl.algorithms.losses import weighted_sum
from mtrl.models.value_head import ValueModel
from mtrl.trainer.data.batching import micro_batches
from mtrl.trainer.update.policy import Policy
from mtrl.types import Sample

VOCABULARY = 53
KINDS = ("plain", "tied", "value", "lora")


def make_lm(tied=False, layers=3, seed=0, **changed):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": layers, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3}
    torch.manual_seed(seed)
    settings = {"vocab_size": VOCABULARY, "tie_word_embeddings": tied, **sizes, **heads, **changed}
    return Qwen3ForCausalLM(Qwen3Config(**settings)).eval()


def make_model(kind):
    if kind == "value":
        model = ValueModel(make_lm())
        with torch.no_grad():
            model.head.weight.normal_(generator=torch.Generator().manual_seed(1))
        return model
    model = make_lm(tied=kind == "tied")
    if kind == "bfloat16 with adapters":
        model = model.bfloat16()
    if kind in ("lora", "bfloat16 with adapters"):
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")).eval()
        with torch.no_grad():  # B starts as 0, which would leave A without a gradient
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(std=0.1)
    return model


def make_batches(count=4, seed=0):
    """Return `count` micro-batches of two samples, whose weights sum to 1."""
    rng = random.Random(seed)
    pairs = [[_sample(rng), _sample(rng)] for _ in range(count)]
    total = sum(sample.action_tokens for pair in pairs for sample in pair)
    shares = [[np.array(sample.loss_mask) / total for sample in pair] for pair in pairs]
    return [micro_batches(*both, 10**6)[0] for both in zip(pairs, shares, strict=True)]


def without_tokens(batch):
    """Return the batch of an idle rank, without sampled tokens."""
    empty = {name: getattr(batch, name)[:0] for name in ("rollout_logprobs", "advantages", "weights", "trajectory")}
    return replace(batch.filler(), action_mask=torch.zeros_like(batch.action_mask), **empty)


def loss_of(model, batch):
    """Return a micro-batch's part of the loss: a policy gradient, or the error of the values."""
    if isinstance(model, ValueModel):
        losses = (model(batch.action_mask, **batch.inputs) - batch.advantages).square()
    else:
        losses = -batch.advantages * Policy(model, None).logprobs(batch)[0]
    return weighted_sum(losses, batch.weights)


def adamw(model, lr=1e-3):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr, eps=1e-6, weight_decay=0.1)


def _sample(rng):
    length = rng.randint(5, 15)
    mask = [False, *(rng.random() < 0.6 for _ in range(length - 2)), True]
    return Sample(
        token_ids=[rng.randrange(VOCABULARY) for _ in range(length)],
        loss_mask=mask,
        logprobs=[-rng.random() if m else 0.0 for m in mask],
        advantages=[rng.gauss(0, 1) if m else 0.0 for m in mask],
        versions=[0 if m else -1 for m in mask],
        turns=[0 if m else -1 for m in mask],
        group_id=str(rng.random()),
    )


class Experts(nn.Module):
    """Two blocks of four experts, of which one is used."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(ExpertBlock() for _ in range(2))

    def forward(self, x, expert):
        for block in self.blocks:
            x = block(x, expert)
        return x


class ExpertBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x, expert):
        return self.experts[expert](x)
