"""SGLang on a machine without a GPU, as a platform plugin (entry point `sglang.srt.platforms` in `setup.py`).

SGLang's own CPU engine needs kernels that no package registry has; with this platform every operator is plain PyTorch.
It is slow, but its numbers are those of the real engine. This module runs inside the engine's environment.
"""

from __future__ import annotations

import os

PLATFORM = "mtrl.engines.sglang.torch_cpu.TorchCpuPlatform"


def activate() -> str | None:
    """Return the path of the platform's class, or None where the platform does not apply: if CUDA is available, or if
    SGLang's own CPU engine is requested (`SGLANG_USE_CPU_ENGINE=1`). SGLang calls this function of every plugin at its
    start."""
    import torch

    if torch.cuda.is_available() or os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1":
        return None
    return PLATFORM
