"""Lower bound of the CPU time of sampling on this machine: bytes to read and products to compute, at measured rates."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

SQUARE = 1024
"""Number of rows and of columns of the square matrices."""
LARGE = 128 * 2**20
"""Bytes of an array that is larger than every cache."""
DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class Geometry:
    """Sizes of a decoder with tied embeddings and gated MLPs. Norms and rotations are not counted."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    itemsize: int = 4
    """Number of bytes of a weight, and of a number in the cache."""

    @property
    def dim(self) -> int:
        return self.hidden // self.heads

    @property
    def shapes(self) -> list[tuple[int, int, int]]:
        """(outputs, inputs, count) of the matrices of one pass. Matrices with the same inputs are merged into one."""
        qkv = (self.heads + 2 * self.kv_heads) * self.dim
        per_layer = [
            (qkv, self.hidden),
            (self.hidden, self.heads * self.dim),
            (2 * self.intermediate, self.hidden),
            (self.hidden, self.intermediate),
        ]
        return [*((*shape, self.layers) for shape in per_layer), (self.vocabulary, self.hidden, 1)]

    @property
    def weights(self) -> int:
        return sum(outputs * inputs * times for outputs, inputs, times in self.shapes)


@dataclass(frozen=True)
class Pass:
    """One pass: `rows` trajectories with `held` cached tokens each get `new` tokens each, and one token is sampled for
    each trajectory."""

    rows: int
    held: int
    new: int

    def bytes(self, of: Geometry) -> int:
        """Return the bytes of the weights, keys and values, which are each read once."""
        cached = 2 * self.rows * (self.held + self.new) * of.layers * of.kv_heads * of.dim
        return (of.weights + cached) * of.itemsize

    def flops(self, of: Geometry) -> int:
        head = of.vocabulary * of.hidden
        looked_at = sum(self.held + i + 1 for i in range(self.new))
        attention = 2 * of.layers * of.heads * of.dim * looked_at
        return 2 * self.rows * ((of.weights - head) * self.new + head + attention)


def passes(rows: int, turns: int, prompt: int, observed: int, sampled: int) -> Iterator[Pass]:
    """Yield the passes of concurrent trajectories. The cache stays between turns, so no token is computed twice."""
    held = 0
    for turn in range(turns):
        for step in range(sampled):
            # The first turn begins with the prompt, later turns with the last sampled token and the observation.
            new = 1 if step else observed + 1 if turn else prompt
            yield Pass(rows, held, new)
            held += new


def working_set(of: Geometry, plan: list[Pass]) -> int:
    """Return the mean number of bytes that a decode step reads."""
    decoding = [step.bytes(of) for step in plan if step.new == 1] or [step.bytes(of) for step in plan]
    return sum(decoding) // len(decoding)


def least_seconds(of: Geometry, plan: list[Pass], bytes_per_s: float, flops_per_s: float) -> float:
    """Return the least seconds of all passes. Reading and multiplying may overlap, so that the longer one counts."""
    return sum(max(step.bytes(of) / bytes_per_s, step.flops(of) / flops_per_s) for step in plan)


def measure_limits(of: Geometry, rows: int, working_set: int) -> dict[str, Any]:
    """Measure the rates of this thread by CPU time; the fastest of several tries counts.

    Returns:
        `memory`: bytes per second of arrays larger than every cache, with the names of STREAM, and of reading an array
        of the size `working_set` repeatedly. `gemm`: FLOP per second by dtype, of square matrices and of the model's
        own matrices with `rows` rows.
    """
    with torch.inference_mode():
        return {
            "memory": memory_rates() | {"read as a step": read_rate(working_set)},
            "gemm": {
                name: {
                    "square": gemm_rate([(SQUARE, SQUARE, 1)], SQUARE, getattr(torch, name)),
                    "own": gemm_rate(of.shapes, rows, getattr(torch, name)),
                }
                for name in DTYPES
            },
        }


def memory_rates() -> dict[str, float]:
    a, b, c = (torch.ones(LARGE // 4) for _ in range(3))
    return {
        "copy": 2 * LARGE / best(lambda: a.copy_(b)),
        "triad": 3 * LARGE / best(lambda: torch.add(b, c, alpha=3.0, out=a)),
        "read": LARGE / best(a.sum),
    }


def read_rate(size: int) -> float:
    array = torch.ones(min(size, LARGE) // 4)
    return array.nbytes / best(array.sum)


def gemm_rate(shapes: list[tuple[int, int, int]], rows: int, dtype: torch.dtype) -> float:
    """Return the FLOP per second of these products, each with the fastest library of PyTorch."""
    seconds, flops = 0.0, 0
    for outputs, inputs, times in shapes:
        x, weight = torch.ones(rows, inputs, dtype=dtype), torch.ones(outputs, inputs, dtype=dtype)
        seconds += times * min(best(way) for way in _ways(x, weight))
        flops += times * 2 * rows * outputs * inputs
    return flops / seconds


def _ways(x: Tensor, weight: Tensor) -> list[Callable[[], Tensor]]:
    """Return functions that compute x @ weight.T: by PyTorch's default library, such as MKL, and by oneDNN with plain
    and with packed weights."""
    ways = [lambda: F.linear(x, weight)]
    # oneDNN cannot multiply in bfloat16 on a processor without AVX-512.
    can_multiply = x.dtype != torch.bfloat16 or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if torch.backends.mkldnn.is_available() and can_multiply:
        onednn = torch.ops.mkldnn._linear_pointwise
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, len(x))
        ways += [lambda: onednn(x, weight, None, "none", [], ""), lambda: onednn(x, packed, None, "none", [], "")]
    return ways


def best(work: Callable[[], Any], seconds: float = 0.05, tries: int = 10) -> float:
    """Return the CPU seconds of the fastest of `tries` tries, which together take about `seconds`."""
    work()
    calls, spent = 1, _timed(work, 1)
    while spent < seconds / tries:
        calls *= 2
        spent = _timed(work, calls)
    return min(spent, *(_timed(work, calls) for _ in range(tries))) / calls


def _timed(work: Callable[[], Any], calls: int) -> float:
    begun = time.thread_time()
    for _ in range(calls):
        work()
    return time.thread_time() - begun
