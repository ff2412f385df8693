"""What autograd keeps of a forward pass, in bytes per token of one decoder layer.

Counted off the modules of Transformers 5 as this trainer runs them: no dropout, no mask, log-probs at the end. The
counts for `sdpa` and `eager` are exact (tests/doctor/test_doctor_activations.py compares them with what autograd's
hooks see); fused kernels keep what `sdpa` keeps. The counting is that of Korthikanti et al. (2205.05198, section 4.1)
for other layers: gated MLPs, RMS norms in float32, grouped-query attention.
"""

from __future__ import annotations

from mtrl.doctor.architecture import MIXTURES, Architecture

FLOAT32 = 4
INDEX = 8


def layer_bytes(model: Architecture, size: int, context: int, attention: str = "sdpa") -> int:
    """Bytes per token that one layer keeps for its backward pass.

    Args:
        size: bytes of a number in what it computes in.
        context: tokens of the row, for attention whose scores are kept (`eager`).
    """
    mlp = _experts(model, size) if model.model_type in MIXTURES else 4 * size * model.intermediate_size
    return 2 * _norm(model, size) + _attention(model, size, context, attention) + mlp


def adapter_bytes(model: Architecture, rank: int, size: int, targets: tuple[str, ...] = (), cast: bool = False) -> int:
    """Bytes per token that LoRA adds to a layer: what is between A and B, and the inputs where they are cast first.

    With what `layer_bytes` says it is a bound: frozen norms keep a little less.
    """
    chosen = model.chosen(targets)
    return len(chosen) * rank * size + cast * FLOAT32 * sum(inputs for inputs, _ in chosen.values())


def _norm(model: Architecture, size: int) -> int:
    """An RMS norm: its input and its result in float32, the reciprocal root, and what it gives."""
    kept = 2 * FLOAT32 + size if model.model_type == "gpt_oss" else FLOAT32 + 2 * size  # which cast at other places
    return kept * model.hidden_size + FLOAT32


def _attention(model: Architecture, size: int, context: int, attention: str) -> int:
    heads, q, kv = model.num_attention_heads, model.queries, model.keys
    normed = 0
    if model.model_type == "qwen3":  # a norm of each head's queries and keys
        normed = (FLOAT32 + size) * (q + kv) + FLOAT32 * (heads + model.num_key_value_heads)
    if attention != "eager":
        return normed + size * (2 * q + 2 * kv) + FLOAT32 * heads
    scores = size * context * heads
    if model.model_type == "gpt_oss":  # keys and values repeated for all heads, the sinks beside the scores
        return size * 4 * q + heads * (INDEX + size) + scores
    softmax = FLOAT32 if size == FLOAT32 else FLOAT32 + size  # computed in float32, and then cast
    return normed + size * 4 * q + softmax * context * heads


def _experts(model: Architecture, size: int) -> int:
    """Grouped experts: for each that a token is sent to its input, 7 inner widths, its output, and indices."""
    one = 2 * size * model.hidden_size + 7 * size * model.intermediate_size + 5 * INDEX + 2 * size
    return model.num_experts_per_tok * one
