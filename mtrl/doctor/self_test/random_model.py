"""A model with random weights in real shapes, and a tokenizer without meaning: no file is downloaded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from mtrl.doctor.architecture import table
from mtrl.doctor.self_test.bench import Bench, Sizes
from mtrl.doctor.self_test.outcome import CaseResult
from mtrl.models.renderer import END, TINY_TEMPLATE
from mtrl.models.tiny import save
from mtrl.preflight.result import passed
from mtrl.types import ROLES

HEAD = 32
"""Width of a head of a small model."""


def build(bench: Bench) -> CaseResult:
    """Write the model to `bench.model`."""
    return write(bench, *shapes(bench.sizes))


def build_mixture(bench: Bench) -> CaseResult:
    """Write a small mixture of experts to `bench.model`."""
    vocabulary, width, layers = (4096, 512, 4) if bench.on_gpu else (512, 64, 2)
    fields, _ = shapes(replace(bench.sizes, shapes=(vocabulary, width, layers)))
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": width}
    return write(bench, {**fields, **experts, "model_type": "qwen3_moe"}, "a small Qwen3-MoE")


def write(bench: Bench, fields: dict[str, Any], what: str) -> CaseResult:
    """Write a model with random weights and these fields of its config.json to `bench.model`."""
    tokenizer = make_tokenizer(fields["vocab_size"])
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = AutoConfig.for_model(**fields, **ids)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    if bench.on_gpu:
        model = model.to(torch.bfloat16)  # the dtype of published weights
    save(model, tokenizer, Path(bench.model))
    parameters = sum(p.numel() for p in model.parameters())
    evidence = f"{what}, {parameters / 1e6:,.1f} M random weights"
    return CaseResult(passed(evidence), {"parameters": parameters})


def shapes(sizes: Sizes) -> tuple[dict[str, Any], str]:
    """Return the fields of the model's config.json, and the name of its shapes."""
    if isinstance(sizes.shapes, str):
        fields = {name: value for name, value in table()[sizes.shapes].items() if name != "parameters"}
        return fields, f"shapes of {sizes.shapes}"
    vocabulary, width, layers = sizes.shapes
    heads = width // HEAD
    fields = {
        "model_type": "qwen3",
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": 3 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": max(2, heads // 2),  # two ranks divide them
        "head_dim": HEAD,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    }
    return fields, "a small Qwen3"


def make_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes; the other `vocabulary` ids are words that no text contains."""
    special = [END, "<|pad|>", *(f"<|{role}|>" for role in ROLES)]
    known = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words = known + [f"<|unused {number}|>" for number in range(vocabulary - len(known))]
    tokenizer = Tokenizer(models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token="<|pad|>",
        chat_template=TINY_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
