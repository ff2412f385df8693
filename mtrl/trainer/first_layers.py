"""A small copy of a model whose weights stay in files, for checks that run a forward pass."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from mtrl.distributed.sharding import decoder_layers
from mtrl.distributed.ties import aliases_of, tie
from mtrl.models.weight_files import file_tensors, forget_files

IGNORED = {"layer_idx", "training", "gradient_checkpointing"}
"""Settings in which layers of one kind may differ: the number of the layer, and whether it is recomputed."""


def first_layers(model: Any) -> Any:
    """Return a copy of a causal LM whose weights stay in files (`file_tensors`), with weights in CPU memory, and with
    so many of its first layers that each kind of layer occurs.

    Raises:
        UserError: a file of the weights cannot be read.
    """
    small = copy.deepcopy(model)
    layers = decoder_layers(small)
    kinds = kinds_of(model)
    count = max((kinds.index(kind) + 1 for kind in kinds), default=0)
    for module in small.modules():
        if isinstance(module, nn.ModuleList) and list(module) == layers:
            del module[count:]
            break
    aliases = aliases_of(small)
    for name, stored in file_tensors(small).items():
        owner, _, leaf = name.rpartition(".")
        empty = small.get_parameter(name)
        weights = nn.Parameter(stored.read().to(empty.dtype), empty.requires_grad)
        setattr(small.get_submodule(owner), leaf, weights)
    tie(small, aliases)
    forget_files(small)
    return small


def kinds_of(model: Any) -> list[str]:
    """Return a text for each layer of a causal LM. It is equal for layers that differ in the values of their weights
    only: it has the layer's type by the configuration, the names, types and plain settings of its modules, and the
    shapes of its parameters."""
    layers = decoder_layers(model)
    types = getattr(model.config.get_text_config(), "layer_types", None) or [""] * len(layers)
    if len(types) != len(layers):  # it is not known which type belongs to which layer
        types = range(len(layers))
    return [f"{name} {_described(layer)}" for name, layer in zip(types, layers, strict=True)]


def _described(layer: nn.Module) -> str:
    modules = [
        (
            name,
            type(module).__qualname__,
            sorted((key, value) for key, value in vars(module).items() if _is_setting(key, value)),
        )
        for name, module in layer.named_modules()
    ]
    return repr((modules, [(name, value.shape) for name, value in layer.named_parameters()]))


def _is_setting(key: str, value: object) -> bool:
    return key not in IGNORED and (value is None or isinstance(value, (bool, int, float, str)))
