"""What mtrl adds to vLLM, by vLLM's entry point `vllm.general_plugins`, in each of its processes."""

from __future__ import annotations


def register() -> None:
    """Make `--weight-transfer-config '{"backend": "mtrl"}'` known; it changes nothing where that is not asked for."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if "mtrl" not in WeightTransferEngineFactory._registry:  # vLLM asks plugins to bear being loaded twice
        WeightTransferEngineFactory.register_engine("mtrl", "mtrl.generator.engines.vllm.receiver", "Receiver")
