"""Memory of the tensors that autograd saves in a forward pass, in bytes per token of one decoder layer.

The counts follow the modules of Transformers 5 as this trainer runs them: no dropout, no mask, log-probs at the end.
The counts for `sdpa` and `eager` are exact (tests/doctor/test_doctor_activations.py compares them with autograd's saved
tensor hooks); fused kernels save the same tensors as `sdpa`. The method is that of Korthikanti et al. (2205.05198,
section 4.1), applied to other layers: gated MLPs, RMS norms in float32, grouped-query attention.
"""

from __future__ import annotations

from mtrl.doctor.architecture import MIXTURES, Architecture

FLOAT32 = 4
INDEX = 8


def layer_bytes(model: Architecture, size: int, context: int, attention: str = "sdpa") -> int:
    """Return the bytes per token that one layer saves for its backward pass.

    Args:
        size: bytes per number of the data type of the computation.
        context: tokens of the row, for attention whose scores are saved (`eager`).
    """
    mlp = _experts(model, size) if model.model_type in MIXTURES else 4 * size * model.intermediate_size
    return 2 * _norm(model, size) + _attention(model, size, context, attention) + mlp


def adapter_bytes(model: Architecture, rank: int, size: int, targets: tuple[str, ...] = (), cast: bool = False) -> int:
    """Return the bytes per token that LoRA adds to a layer: the tensor between A and B, and the inputs if they are cast
    first.

    The sum with `layer_bytes` is an upper bound: frozen norms save slightly less.
    """
    chosen = model.chosen(targets)
    return len(chosen) * rank * size + cast * FLOAT32 * sum(inputs for inputs, _ in chosen.values())


def _norm(model: Architecture, size: int) -> int:
    """Return the bytes per token of an RMS norm: its input and its result in float32, the reciprocal root, and its
    output."""
    saved = (
        2 * FLOAT32 + size if model.model_type == "gpt_oss" else FLOAT32 + 2 * size
    )  # gpt_oss casts at another place
    return saved * model.hidden_size + FLOAT32


def _attention(model: Architecture, size: int, context: int, attention: str) -> int:
    heads, q, kv = model.num_attention_heads, model.queries, model.keys
    normed = 0
    if model.model_type in ("qwen3", "qwen3_moe"):  # each head's queries and keys are normed
        normed = (FLOAT32 + size) * (q + kv) + FLOAT32 * (heads + model.num_key_value_heads)
    if attention != "eager":
        return normed + size * (2 * q + 2 * kv) + FLOAT32 * heads
    scores = size * context * heads
    if model.model_type == "gpt_oss":  # keys and values are repeated for all heads, the sinks are beside the scores
        return size * 4 * q + heads * (INDEX + size) + scores
    softmax = FLOAT32 if size == FLOAT32 else FLOAT32 + size  # the softmax is computed in float32 and then cast
    return normed + size * 4 * q + softmax * context * heads


def _experts(model: Architecture, size: int) -> int:
    """Return the bytes per token of grouped experts: for each selected expert the input, 7 inner widths (qwen3_moe: 4,
    and the router's probabilities of all experts), the output, and indices."""
    if model.model_type == "qwen3_moe":
        one = 2 * size * model.hidden_size + 4 * size * model.intermediate_size + 4 * INDEX + size
        return model.num_experts_per_tok * one + FLOAT32 * model.num_local_experts
    one = 2 * size * model.hidden_size + 7 * size * model.intermediate_size + 5 * INDEX + 2 * size
    return model.num_experts_per_tok * one
