"""The weights that are sent to servers: full weights, in the servers' precision."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Protocol

import torch
from torch import Tensor

from mtrl.engines.server.model_folder import model_folder, model_shapes
from mtrl.errors import UserError


class WeightExport(Protocol):
    """Converts the tensors that the trainer trains to the weights that servers load."""

    def __call__(self, trained: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield full weights with their names in a checkpoint, each converted when it is taken. A tensor may share its
        memory with one of `trained`.

        Raises:
            UserError: the weights do not fit the servers' model; it is raised before the first tensor.
        """


class FullWeights:
    """A `WeightExport` for a trainer that trains full weights: their precision changes, and where Transformers stores
    other tensors than the files of the model, their names and shapes, such as those of stacked experts.

    Names and shapes must then be those of the model that the servers started with. Engines treat other weights
    differently: SGLang ignores names that it does not know, and ends itself at a wrong shape.
    """

    def __init__(self, model: str, dtype: str):
        """`model`: folder or Hub name. The weights are not compared with a model without safetensors files."""
        self._model, self._dtype = model, getattr(torch, dtype)
        self._shapes: dict[str, tuple[int, ...]] | None = None
        self._file_names: FileNames | None = None

    def __call__(self, trained: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        if self._shapes is None:
            self._shapes = model_shapes(self._model)
            if self._shapes and trained.keys() != self._shapes.keys():
                with suppress(OSError, ValueError):  # Transformers does not know the architecture: names are compared
                    self._file_names = FileNames(self._model)
        self._check({name: torch.empty_like(value, device="meta") for name, value in trained.items()})
        return self._converted(trained)

    def _converted(self, trained: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        weights = self._file_names(trained) if self._file_names is not None else iter(trained.items())
        return ((name, in_precision(value.detach(), self._dtype)) for name, value in weights)

    def _check(self, trained: Mapping[str, Tensor]) -> None:
        shapes = {name: tuple(value.shape) for name, value in self._converted(trained)}
        if self._shapes and (differences := _differences(shapes, self._shapes)):
            raise UserError(
                f"model.path={self._model}: the trainer's weights have other names or shapes than its files, from "
                f"which servers load them ({differences}); use generator.backend=local for this model"
            )


class FileNames:
    """Converts the tensors of a Transformers model to those of its files, as `save_pretrained` does.

    Transformers 5 stacks the experts of a layer when it loads a model (`mlp.experts.gate_up_proj`), and its own reverse
    conversion gives the matrices of each expert back (`mlp.experts.7.gate_proj.weight`).
    """

    def __init__(self, model: str):
        """
        Args:
            model: folder or Hub name; only its configuration is read.

        Raises:
            OSError, ValueError: Transformers itself has no such architecture.
        """
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.from_pretrained(model_folder(model), trust_remote_code=False)
        with torch.device("meta"):
            self._skeleton = AutoModelForCausalLM.from_config(config)

    def __call__(self, weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors with their names in the files. Layers are converted one after another, so that at most one
        layer exists twice."""
        from transformers.core_model_loading import revert_weight_conversion

        layers: dict[str, list[str]] = {}
        for name in weights:
            layers.setdefault(_layer(name), []).append(name)
        for names in layers.values():
            yield from revert_weight_conversion(self._skeleton, {name: weights[name] for name in names}).items()


def _layer(name: str) -> str:
    """Return the part of a name up to the first number, such as `model.layers.3`; empty for other tensors."""
    found = re.match(r".*?\.\d+(?=\.)", name)
    return found[0] if found else ""


def _differences(ours: Mapping[str, tuple[int, ...]], theirs: Mapping[str, tuple[int, ...]]) -> str:
    """Describe up to three differences; empty where there are none."""
    differences = [
        *(f"{name} is missing in the files" for name in ours.keys() - theirs.keys()),
        *(f"{name} is only in the files" for name in theirs.keys() - ours.keys()),
        *(
            f"{name} is {ours[name]}, in the files {theirs[name]}"
            for name in ours.keys() & theirs
            if ours[name] != theirs[name]
        ),
    ]
    return "; ".join(sorted(differences)[:3])


def in_precision(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a tensor to `dtype`, rounding to nearest. Tensors of integers are not changed."""
    return (value.to(dtype) if value.is_floating_point() else value).contiguous()
