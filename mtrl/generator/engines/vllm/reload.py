"""New weights into a vLLM model that is loaded already, layer by layer, and none of them forgotten.

Runs inside the engine's environment. vLLM packs weights when it loads them, so a copy into its parameters will not do:
its layerwise reload takes each layer apart and packs it again.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

log = logging.getLogger(__name__)

SHOWN = 8
"""Names in an error."""


class Reload:
    """One update of a model: `take` any number of times, `check`, then `finish`, or `abandon`."""

    def __init__(self, model: nn.Module, model_config: Any):
        self._model: Any = model  # whose `load_weights` torch does not know
        self._model_config = model_config
        # Before anything is taken apart: two tied parameters are one, and have one name. Layers that adapters may go
        # on wrap their own ones, which vLLM loads by their plain names.
        self._parameters = {name.replace(".base_layer.", ".") for name, _ in model.named_parameters()}
        self._received: set[str] = set()
        self._loaded: set[str] = set()
        initialize_layerwise_reload(model)

    def take(self, weights: Mapping[str, Tensor]) -> None:
        """Load these, by the names of a Hugging Face checkpoint.

        Raises:
            ValueError, KeyError, AssertionError: the model does not know a name, or another shape.
        """
        try:
            loaded = self._model.load_weights(iter(weights.items()))
        except ValueError as error:  # which goes on with all names that it knows
            raise ValueError(str(error).partition(" The available")[0]) from error
        self._received |= set(weights)
        self._loaded |= {name.replace(".base_layer.", ".") for name in loaded or ()}

    def check(self) -> None:
        """
        Raises:
            ValueError: not all weights of the model have come.
        """
        pieces = getattr(self._model, "packed_modules_mapping", {})
        missing = sorted({*(self._parameters - self._loaded), *absent_pieces(self._received, pieces)})
        if missing:
            more = f" and {len(missing) - SHOWN} more" if len(missing) > SHOWN else ""
            raise ValueError(f"{len(missing)} weights did not come: {', '.join(missing[:SHOWN])}{more}")

    def finish(self) -> None:
        """The model has its new weights."""
        finalize_layerwise_reload(self._model, self._model_config)
        pack_heads(self._model)

    def abandon(self) -> None:
        """Put the layers together again, whatever has come: the model can take another update.

        Layers of which a part has come keep their old weights, those that were whole have new ones.
        """
        try:
            for layer in self._model.modules():
                info = get_layerwise_info(layer)
                if info.can_load():
                    info.load_numel, info.loaded_weights = 0, []
            self.finish()
        except Exception:  # what led here is the error to be told
            log.exception("a model could not be put together after an update that failed")


def absent_pieces(received: Collection[str], pieces: Mapping[str, Iterable[str]]) -> Iterator[str]:
    """Names that should have come beside one that did: vLLM makes one matrix of some (q, k and v), and says that it is
    loaded when one piece is there."""
    names = set(received)
    for name in names:
        module, _, rest = name.rpartition(".")
        parent, _, own = module.rpartition(".")
        for parts in map(list, pieces.values()):
            if len(parts) > 1 and own in parts:
                yield from ({f"{parent}.{part}.{rest}" for part in parts} - names)


def pack_heads(model: nn.Module) -> None:
    """On a CPU vLLM computes logits from a packed copy of the output matrix. Where that is tied to the embedding a
    reload does not pack it again: logits stayed those of the first weights."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)
