"""The platform that `platform.py` names. It imports SGLang and runs only inside the engine's environment."""

from __future__ import annotations

from typing import Any

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

from mtrl.engines.sglang.platform import ignore_pinning


class TorchCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """PyTorch's own operators on a CPU: no Triton, no graphs, no SGLang kernels."""

    _enum = PlatformEnum.OOT
    device_name = device_type = "cpu"
    capabilities = PlatformCapabilities()

    def __init__(self) -> None:
        super().__init__()
        ignore_pinning()

    def is_pin_memory_available(self, device: Any = None) -> bool:
        return False

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_dispatch_key_name(self) -> str:
        return "native"  # every layer's `forward_native`
