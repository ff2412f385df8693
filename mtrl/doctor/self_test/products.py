"""The rate of matrix products, which is the peak that other rates are compared with."""

from __future__ import annotations

import time

import torch

from mtrl.doctor.self_test.bench import Bench
from mtrl.doctor.self_test.outcome import CaseResult
from mtrl.preflight.result import passed
from mtrl.trainer.flops import peak_flops

SIZE = 8192
"""Width of the square matrices on a GPU."""
SECONDS = 0.5
"""Duration of a measurement on a GPU, in seconds."""


def products(bench: Bench) -> CaseResult:
    """Measure the rate of each dtype, beside that of the table of known GPUs."""
    device = torch.device("cuda" if bench.on_gpu else "cpu")
    figures: dict[str, float] = {}
    texts = []
    for dtype in (torch.bfloat16, torch.float32):
        name = str(dtype).removeprefix("torch.")
        rate = measured_rate(device, dtype)
        figures[f"{name}_tflops_per_second"] = rate / 1e12
        text = f"{name} {rate / 1e12:.3g} TFLOP/s"
        if bench.on_gpu and (listed := peak_flops(device, dtype)):
            figures[f"{name}_data_sheet_tflops_per_second"] = listed / 1e12
            text += f" ({rate / listed:.0%} of the data sheet)"
        texts.append(text)
    return CaseResult(passed(", ".join(texts)), figures)


def peak_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Return the peak FLOP/s of a device: from the table of known GPUs, else measured."""
    return peak_flops(device, dtype) or measured_rate(device, dtype)


def measured_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Return the rate of products of large matrices, in FLOP/s."""
    if device.type == "cpu":
        rate = peak_flops(device, dtype)
        assert rate is not None  # measured on a CPU
        return rate
    matrix = torch.randn(SIZE, SIZE, device=device, dtype=dtype)
    torch.mm(matrix, matrix)
    torch.cuda.synchronize()
    start, count = time.perf_counter(), 0
    while (seconds := time.perf_counter() - start) < SECONDS:
        torch.mm(matrix, matrix)
        torch.cuda.synchronize()
        count += 1
    return count * 2 * SIZE**3 / seconds
