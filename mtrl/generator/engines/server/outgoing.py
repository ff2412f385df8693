"""What is sent to servers: whole weights, in the servers' precision."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from mtrl.errors import UserError
from mtrl.generator.engines.server.model_folder import model_shapes


class Outgoing(Protocol):
    """From what the trainer trains to what servers load."""

    def __call__(self, trained: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole weights by the names of a checkpoint, each with memory of its own or shared with `trained`."""


class Whole:
    """The trainer has whole weights: only their precision changes.

    They must be those of the model that the servers started with, by name and shape. Engines differ in what they make
    of others: SGLang passes over names that it does not know, and ends itself at a wrong shape.
    """

    def __init__(self, model: str, dtype: str):
        """`model` is a folder or Hub name; one without safetensors files is not compared."""
        self._model, self._dtype = model, getattr(torch, dtype)
        self._shapes: dict[str, tuple[int, ...]] | None = None

    def __call__(self, trained: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """
        Raises:
            UserError: they are others.
        """
        if self._shapes is None:
            self._shapes = model_shapes(self._model)
        if self._shapes and (odd := _differences({n: tuple(v.shape) for n, v in trained.items()}, self._shapes)):
            raise UserError(
                f"model.path={self._model}: the trainer's weights have other names or shapes than its files, which "
                f"servers load by ({odd}); take generator.backend=local for this model"
            )
        return {name: in_precision(value.detach(), self._dtype) for name, value in trained.items()}


def _differences(ours: Mapping[str, tuple[int, ...]], theirs: Mapping[str, tuple[int, ...]]) -> str:
    """Some of them; empty where there are none."""
    odd = [
        *(f"{name} is not in them" for name in ours.keys() - theirs.keys()),
        *(f"{name} is in them alone" for name in theirs.keys() - ours.keys()),
        *(
            f"{name} is {ours[name]}, there {theirs[name]}"
            for name in ours.keys() & theirs
            if ours[name] != theirs[name]
        ),
    ]
    return "; ".join(sorted(odd)[:3])


def in_precision(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounded once, to the nearest. Tables of whole numbers stay what they are."""
    return (value.to(dtype) if value.is_floating_point() else value).contiguous()
