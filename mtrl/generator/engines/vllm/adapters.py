"""Turns without an adapter beside turns with one, on a CPU: vLLM 0.32 gives them the adapter in its last place.

Runs inside the engine's environment. Its tables say -1 for "none", and its torch kernels take that as an index.
"""

from __future__ import annotations

from torch import Tensor


def spare_plain_turns() -> None:
    """Let the kernel that every adapter begins with give nothing for rows without an adapter."""
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    shrink = lora_ops.bgmv_shrink
    if shrink.__module__ == __name__:
        return  # a worker may be made twice in one process

    def bgmv_shrink(inputs: Tensor, weights: Tensor, output: Tensor, places: Tensor, scaling: float = 1.0) -> None:
        shrink(inputs, weights, output, places, scaling)
        output[: len(places)][places < 0] = 0

    lora_ops.bgmv_shrink = punica_cpu.bgmv_shrink = bgmv_shrink
