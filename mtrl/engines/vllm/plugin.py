"""The plugin of mtrl for vLLM (entry point `vllm.general_plugins`), which vLLM loads in each of its processes."""

from __future__ import annotations

from mtrl.engines.vllm.answers import read_all_answers


def register() -> None:
    """Register the backend of `--weight-transfer-config '{"backend": "mtrl"}'`; without it, nothing changes."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if "mtrl" not in WeightTransferEngineFactory._registry:  # vLLM may load a plugin twice
        WeightTransferEngineFactory.register_engine("mtrl", "mtrl.engines.vllm.receiver", "WeightReceiver")
    read_all_answers()
