"""Loads new weights into a vLLM model that is loaded already, layer by layer, and checks that none are missing.

This module runs inside the engine's environment. vLLM packs weights when it loads them, so that they cannot be copied
into its parameters: vLLM's layerwise reload unpacks each layer and packs it again.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

log = logging.getLogger(__name__)

MAX_NAMES = 8
"""Maximum number of names in an error."""


class Reload:
    """One update of a model: call `take` any number of times, then `check` and `finish`, or `abandon`."""

    def __init__(self, model: nn.Module, model_config: Any):
        self._model: Any = model  # Any, because nn.Module has no `load_weights`
        self._model_config = model_config
        # The names are read before the layers are unpacked: until then, tied parameters are one object with one name.
        # Layers with adapters wrap a base layer, which vLLM loads by its plain name.
        self._parameters = {name.replace(".base_layer.", ".") for name, _ in model.named_parameters()}
        self._received: set[str] = set()
        self._loaded: set[str] = set()
        initialize_layerwise_reload(model)

    def take(self, weights: Mapping[str, Tensor]) -> None:
        """Load these weights, by the names of a Hugging Face checkpoint.

        Raises:
            ValueError, KeyError, AssertionError: the model has no weight of a name, or one of another shape.
        """
        try:
            loaded = self._model.load_weights(iter(weights.items()))
        except ValueError as error:  # the rest of vLLM's message lists all known names
            raise ValueError(str(error).partition(" The available")[0]) from error
        self._received |= set(weights)
        self._loaded |= {name.replace(".base_layer.", ".") for name in loaded or ()}

    def check(self) -> None:
        """Check that all weights of the model have arrived.

        Raises:
            ValueError: some weights have not arrived.
        """
        pieces = getattr(self._model, "packed_modules_mapping", {})
        missing = sorted({*(self._parameters - self._loaded), *absent_pieces(self._received, pieces)})
        if missing:
            more = f" and {len(missing) - MAX_NAMES} more" if len(missing) > MAX_NAMES else ""
            raise ValueError(f"{len(missing)} weights did not arrive: {', '.join(missing[:MAX_NAMES])}{more}")

    def finish(self) -> None:
        """Pack the layers again, so that the model uses the new weights."""
        finalize_layerwise_reload(self._model, self._model_config)
        pack_heads(self._model)

    def abandon(self) -> None:
        """Pack the layers again after an incomplete update, so that the model can take another one.

        Layers with incomplete new weights keep their old ones; complete layers have their new weights.
        """
        try:
            for layer in self._model.modules():
                info = get_layerwise_info(layer)
                if info.can_load():
                    info.load_numel, info.loaded_weights = 0, []
            self.finish()
        except Exception:  # only logged: the caller raises the error that made it abandon the update
            log.exception("a model could not be restored after an update that failed")


def absent_pieces(received: Collection[str], pieces: Mapping[str, Iterable[str]]) -> Iterator[str]:
    """Yield the names of missing pieces of packed matrices. vLLM packs several weights into one matrix (q, k and v),
    and reports the matrix as loaded when one piece has arrived."""
    names = set(received)
    for name in names:
        module, _, rest = name.rpartition(".")
        parent, _, own = module.rpartition(".")
        for parts in map(list, pieces.values()):
            if len(parts) > 1 and own in parts:
                yield from ({f"{parent}.{part}.{rest}" for part in parts} - names)


def pack_heads(model: nn.Module) -> None:
    """Pack the output matrices of the model again.

    On a CPU vLLM computes logits from a packed copy. Where the output matrix is tied to the embedding, a reload does
    not update that copy: logits would be those of the first weights.
    """
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)
