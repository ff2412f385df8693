"""The weights that are sent to servers: full weights, in the servers' precision."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from mtrl.engines.server.model_folder import model_shapes
from mtrl.errors import UserError


class WeightExport(Protocol):
    """Converts the tensors that the trainer trains to the weights that servers load."""

    def __call__(self, trained: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return full weights by the names of a checkpoint. A tensor may share its memory with one of `trained`."""


class FullWeights:
    """A `WeightExport` for a trainer that trains full weights: only their precision changes.

    Their names and shapes must be those of the model that the servers started with. Engines treat other weights
    differently: SGLang ignores names that it does not know, and ends itself at a wrong shape.
    """

    def __init__(self, model: str, dtype: str):
        """`model`: folder or Hub name. The weights are not compared with a model without safetensors files."""
        self._model, self._dtype = model, getattr(torch, dtype)
        self._shapes: dict[str, tuple[int, ...]] | None = None

    def __call__(self, trained: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """
        Raises:
            UserError: names or shapes differ from those of the model.
        """
        if self._shapes is None:
            self._shapes = model_shapes(self._model)
        if self._shapes and (
            differences := _differences({n: tuple(v.shape) for n, v in trained.items()}, self._shapes)
        ):
            raise UserError(
                f"model.path={self._model}: the trainer's weights have other names or shapes than its files, from "
                f"which servers load them ({differences}); use generator.backend=local for this model"
            )
        return {name: in_precision(value.detach(), self._dtype) for name, value in trained.items()}


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
