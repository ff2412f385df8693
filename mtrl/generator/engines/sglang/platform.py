"""SGLang on a machine without a GPU, by its own door for platforms (entry point `sglang.srt.platforms` in `setup.py`).

Its own CPU engine needs kernels that no package registry has; with this platform every operator is plain PyTorch. It is
slow, and its numbers are those of the real engine. Runs inside the engine's environment.
"""

from __future__ import annotations

import os

PLATFORM = "mtrl.generator.engines.sglang.torch_cpu.TorchCpuPlatform"


def activate() -> str | None:
    """What SGLang asks every plugin at its start: the platform's class, or None for "not my hardware": where CUDA is
    present, and where SGLang's own CPU engine is asked for (`SGLANG_USE_CPU_ENGINE=1`)."""
    import torch

    if torch.cuda.is_available() or os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1":
        return None
    return PLATFORM
