"""A fix for turns without an adapter that share a batch with turns with one, on a CPU: vLLM 0.32 gives them the adapter
in its last slot, because its tables use -1 for "no adapter" and its torch kernels take that as an index.

This module runs inside the engine's environment.
"""

from __future__ import annotations

from torch import Tensor


def spare_plain_turns() -> None:
    """Patch the shrink kernel, the first step of every adapter, so that it gives zeros for rows without an adapter."""
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    shrink = lora_ops.bgmv_shrink
    if shrink.__module__ == __name__:
        return  # a process may create two workers

    def bgmv_shrink(inputs: Tensor, weights: Tensor, output: Tensor, places: Tensor, scaling: float = 1.0) -> None:
        shrink(inputs, weights, output, places, scaling)
        output[: len(places)][places < 0] = 0

    lora_ops.bgmv_shrink = punica_cpu.bgmv_shrink = bgmv_shrink
