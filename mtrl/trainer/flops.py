"""FLOPs that a model needs, and FLOP/s of devices."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from mtrl.models.attention import text_config


@dataclass(frozen=True)
class ModelFlops:
    """Sizes of a transformer that determine its floating-point operations.

    A weight of a matrix costs 2 FLOPs per token forward (a product and a sum), 2 backward for the gradient of its
    input and 2 for its own gradient: 6 N in total (Kaplan et al., 2001.08361, section 2.1). A weight that is not
    trained costs 4, so that LoRA costs 4 N plus 2 for each weight of the adapters. Attention of a token to one other
    costs 4 x width forward in every layer and twice that backward: the 12 L H Q T per token of PaLM (2204.02311,
    appendix B), halved here because attention is causal. Recomputation (gradient checkpointing) and padding do not
    count, and the head counts only at sampled positions, since no other logits are needed.
    """

    body: int
    """Number of weights of the matrices that every token passes through; of experts, those that one token is routed
    to."""
    body_trained: int
    """Number of weights in `body` that have a gradient."""
    head: int
    """Number of weights of the output layer, tied or not."""
    head_trained: int
    width: int
    """Number of heads x size of a head."""
    windows: tuple[int | None, ...]
    """Window of each layer with attention, in tokens; None: the whole sequence."""

    def forward(self, lengths: Sequence[int], sampled: int) -> float:
        """Return the FLOPs of a forward pass over sequences of these lengths, with logits at `sampled` positions."""
        return 2.0 * self.body * sum(lengths) + 2.0 * self.head * sampled + self._attention(lengths)

    def training(self, lengths: Sequence[int], sampled: int) -> float:
        """Return the FLOPs of the forward and the backward pass."""
        body = (4.0 * self.body + 2.0 * self.body_trained) * sum(lengths)
        head = (4.0 * self.head + 2.0 * self.head_trained) * sampled
        return body + head + 3.0 * self._attention(lengths)

    def _attention(self, lengths: Sequence[int]) -> float:
        pairs = {window: sum(_pairs(length, window) for length in lengths) for window in set(self.windows)}
        return 4.0 * self.width * sum(pairs[window] for window in self.windows)


def _pairs(length: int, window: int | None) -> float:
    """Return the number of pairs of tokens of which one attends to the other: half a square, minus the corner outside
    of the window."""
    reach = length if window is None else min(length, window)
    return reach * (length - reach / 2)


def model_flops(model: Any) -> ModelFlops:
    """Count the weights of a causal LM or of a value model, also with adapters, shards or experts. The weights of a
    vision tower are left out."""
    text = text_config(model)
    output = getattr(model, "get_output_embeddings", lambda: None)()
    head = [] if output is None else [output.weight]
    apart = {id(weight) for weight in [*head, *_tables(model)]}
    share = _active_experts(text)
    body = trained = 0.0
    for name, weight in model.named_parameters():
        if weight.dim() > 1 and id(weight) not in apart and ".visual." not in name:  # the tower computes patches
            size = weight.numel() * (share if ".experts." in name else 1.0)
            body += size
            trained += size * weight.requires_grad
    heads = text.num_attention_heads
    width = heads * (getattr(text, "head_dim", None) or text.hidden_size // heads)
    head_trained = sum(weight.numel() for weight in head if weight.requires_grad)
    return ModelFlops(round(body), round(trained), sum(w.numel() for w in head), head_trained, width, _windows(text))


def _tables(model: Any) -> Iterable[Tensor]:
    """Return the weights of embeddings, which are looked up without arithmetic."""
    return (module.weight for module in model.modules() if isinstance(module, nn.Embedding))


def _active_experts(text: Any) -> float:
    """Return the share of the experts that a token is routed to."""
    experts = getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None)
    return text.num_experts_per_tok / experts if experts else 1.0


def _windows(text: Any) -> tuple[int | None, ...]:
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
    reach = {
        "full_attention": None,
        "sliding_attention": getattr(text, "sliding_window", None),
        "chunked_attention": getattr(text, "attention_chunk_size", None),
    }
    return tuple(reach[kind] for kind in kinds if kind in reach)  # the cost of linear attention is negligible


@dataclass(frozen=True)
class Peak:
    """Dense peak performance of a GPU in TFLOP/s from its data sheet (half of values that are given with sparsity)."""

    words: tuple[str, ...]
    """Words that must all occur in the name of the device."""
    half: float
    """Peak in bfloat16 and float16 with sums in float32."""
    tf32: float
    float32: float


PEAKS = (
    Peak(("GB200",), 2500, 1250, 80),
    Peak(("B200",), 2250, 1125, 75),
    Peak(("H200", "NVL"), 835, 418, 60),
    Peak(("H200",), 989, 494, 67),
    Peak(("GH200",), 989, 494, 67),
    Peak(("H100", "NVL"), 835, 418, 60),
    Peak(("H100", "PCIe"), 756, 378, 51),
    Peak(("H100",), 989, 494, 67),
    Peak(("H20",), 148, 74, 44),
    Peak(("A100",), 312, 156, 19.5),
    Peak(("A800",), 312, 156, 19.5),
    Peak(("A30",), 165, 82, 10.3),
    Peak(("A40",), 149.7, 74.8, 37.4),
    Peak(("RTX", "A6000"), 154.8, 77.4, 38.7),
    Peak(("A10",), 125, 62.5, 31.2),
    Peak(("L40S",), 362, 183, 91.6),
    Peak(("L40",), 181, 90.5, 90.5),
    Peak(("L4",), 121, 60, 30.3),
    Peak(("5090",), 209.5, 104.8, 104.8),
    Peak(("4090",), 165.2, 82.6, 82.6),
    Peak(("3090",), 71, 35.6, 35.6),
    Peak(("MI300X",), 1307, 654, 163.4),
    Peak(("MI325X",), 1307, 654, 163.4),
    Peak(("MI355X",), 2517, 157.3, 157.3),
)
"""Peaks of known GPUs. The first match counts, so more specific names come first."""


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return the peak FLOP/s of a device in matrix products of this dtype; None if it is not known.

    A GPU is looked up by its name. For a CPU the rate is measured once, with the threads of the process, which takes a
    fifth of a second.
    """
    if device.type == "cuda":
        return gpu_peak(torch.cuda.get_device_name(device), dtype)
    return _measured(dtype, torch.get_num_threads()) if device.type == "cpu" else None


def gpu_peak(name: str, dtype: torch.dtype) -> float | None:
    """Return the peak FLOP/s of the GPU with this name (`torch.cuda.get_device_name`); None if it is not in the
    table."""
    words = set(name.replace("-", " ").replace("_", " ").upper().split())
    found = next((peak for peak in PEAKS if {word.upper() for word in peak.words} <= words), None)
    if found is None or dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return None
    if dtype != torch.float32:
        return found.half * 1e12
    tf32 = torch.backends.cuda.matmul.fp32_precision == "tf32"
    return (found.tf32 if tf32 else found.float32) * 1e12


@cache
def _measured(dtype: torch.dtype, threads: int) -> float:
    """Return the best rate, in FLOP/s, of products of square matrices, which grow until a product takes 10 ms. It draws
    no random numbers.

    `threads` is only a part of the cache key.
    """
    best, size, end = 0.0, 64, time.perf_counter() + 0.15
    matrix = torch.ones(size, size, dtype=dtype)
    while True:
        start = time.perf_counter()
        torch.mm(matrix, matrix)
        now = time.perf_counter()
        best = max(best, 2 * size**3 / (now - start))
        if now >= end:
            return best
        if now - start < 0.01 and size < 1024:
            size *= 2
            matrix = torch.ones(size, size, dtype=dtype)
