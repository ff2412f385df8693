"""A tiny model that every engine can load, and the trainer's log-probs of sampled tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from mtrl.engines.server.changes import find_changes

CONTEXT = 512
PARITY = 1e-4
"""Greatest difference in nats of log-probs of an engine and of the trainer in float32."""


def make_model(folder: Path, tokenizer: Any, *, is_tied: bool = True, seed: int = 0) -> Path:
    """Write a random Qwen3 of two layers in float32 as a Hugging Face folder, and return the folder."""
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=CONTEXT, initializer_range=0.2,
        tie_word_embeddings=is_tied, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        Qwen3ForCausalLM(config).float().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def load_model(folder: Path) -> Any:
    """Load the model as the trainer does."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def changed(model: Any, seed: int, by: float = 0.05) -> Any:
    """Change every parameter of the model a little, as a training step does, and return the model."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += by * torch.randn(parameter.shape, generator=generator)
    return model


def lost_change(name: str, new: torch.Tensor, old: torch.Tensor | None) -> Any:
    """Find the changes of a tensor, and lose the last one."""
    if old is None:
        return find_changes(name, new, old)
    last = new.clone()
    last.view(-1)[-1] = old.reshape(-1)[-1]
    return find_changes(name, last, old)


def named_weights(model: Any) -> dict[str, torch.Tensor]:
    """Return the weights by name as a sync sends them, without duplicates of tied ones."""
    tied = set(getattr(model, "all_tied_weights_keys", None) or ()) if model.config.tie_word_embeddings else set()
    return {name: value.detach().clone() for name, value in model.state_dict().items() if name not in tied}


@torch.no_grad()
def reference_logprobs(
    model: Any, prompt: Sequence[int], sampled: Sequence[int], temperature: float = 1.0
) -> list[float]:
    """Return the log-softmax of the logits, divided by the temperature (1 when greedy), at each sampled id."""
    ids = torch.tensor([[*prompt, *sampled]])
    logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float() / (temperature or 1.0)
    return logits.log_softmax(-1)[torch.arange(len(sampled)), ids[0, len(prompt) :]].tolist()


def worst(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the largest difference of two lists of the same length."""
    return max((abs(a - b) for a, b in zip(ours, theirs, strict=True)), default=0.0)
