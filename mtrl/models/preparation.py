"""Preparation of a model for training: packed samples that attend only to themselves, sequences in parts, recomputed
activations.

The boundaries of packed samples follow from the positions, which restart at 0 with every sample.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu
from transformers.modeling_layers import GradientCheckpointingLayer

from mtrl.errors import UserError
from mtrl.models.attention import OWN, attention_of, use_own_attention

PROBE = 8
"""Length of each of the two sequences that `keeps_apart` and `splits` run, in tokens."""
CHECKPOINT = "_gradient_checkpointing_func"
"""Attribute of Transformers' layers that holds the function by which they are recomputed."""


def prepare_packing(model: Any) -> None:
    """Prepare a model for packed samples, without a dense mask if possible, and check that it keeps them apart.

    Raises:
        UserError: the model does not keep packed samples apart, or takes no position ids.
    """
    if use_own_attention(model) and not keeps_apart(model):
        model.set_attn_implementation("sdpa")  # the layers of this model do not pass the positions to attention
    if not keeps_apart(model):
        raise UserError(
            f"trainer.packing=true lays samples end to end, and {type(model).__name__} does not keep them apart by "
            "their position ids; set trainer.packing=false"
        )


@torch.no_grad()
def keeps_apart(model: Any) -> bool:
    """Return whether packed samples do not influence each other in this model.

    State-space layers and models with custom code may mix them. Two short sequences are run packed, separately, and
    joined to one sequence: the packed result must equal the separate one, up to a rounding that is small compared with
    the effect of joining.
    """
    vocabulary = model.config.get_text_config().vocab_size
    ids = (torch.arange(2 * PROBE, device=model.device) % vocabulary)[None]
    positions = torch.arange(PROBE, device=model.device).repeat(2)[None]

    def second(ids: Tensor, **inputs: Tensor) -> Tensor:
        return model(input_ids=ids, use_cache=False, **inputs).logits[:, -PROBE:].float()

    apart, joined = second(ids[:, PROBE:]), second(ids)
    try:
        leak = (second(ids, position_ids=positions) - apart).norm()
    except TypeError:  # the model takes no position ids
        return False
    return bool(leak <= torch.finfo(model.dtype).eps ** 0.5 * (joined - apart).norm())


def prepare_parts(model: Any, size: int) -> None:
    """Prepare a model for sequences in `size` parts, and check that it can compute them.

    Raises:
        UserError: its attention is not mtrl's own, `size` does not divide its attention heads, or its tokens depend on
            each other outside of attention.
    """
    name, config = type(model).__name__, model.config.get_text_config()
    attention = attention_of(model)
    if attention != OWN and not use_own_attention(model):
        found = "layers of other kinds" if attention == "sdpa" else f"{attention} attention"
        raise UserError(
            f"trainer.sequence_parallel={size} needs attention to the whole sequence by sdpa in every layer, and "
            f"{name} has {found}; set trainer.sequence_parallel=1"
        )
    heads = config.num_attention_heads
    if heads % size:
        raise UserError(
            f"trainer.sequence_parallel={size} does not divide the {heads} attention heads of {name}; use a divisor of "
            f"{heads}"
        )
    if not splits(model):
        raise UserError(
            f"trainer.sequence_parallel={size} splits sequences, and the tokens of {name} depend on each other outside "
            "of its attention, or its layers do not pass their arguments to attention; set trainer.sequence_parallel=1"
        )


@dataclass
class _Continued:
    """The argument `head_exchange` of a forward over a part of a sequence, whose attention takes the keys and values of
    the part before it from that part's own forward."""

    before: Sequence[tuple[Tensor, Tensor]] = ()
    """Keys and values of the part before, by call of attention; empty for the first part."""
    states: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Keys and values of this part, by call of attention."""

    def attend(
        self,
        attention: Callable[..., Tensor],
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        **kwargs: Any,
    ) -> Tensor:
        parts = [*self.before[len(self.states) : len(self.states) + 1], (key, value)]
        self.states.append((key, value))
        key, value = (torch.cat(states, 2) for states in zip(*parts, strict=True))
        return attention(module, query, key, value, mask, **{**kwargs, "position_ids": None})


@torch.no_grad()
def splits(model: Any) -> bool:
    """Return whether the tokens of a model with mtrl's attention depend on each other only by attention, to which its
    layers pass the argument `head_exchange`.

    The second half of a sequence is computed from its own tokens, and from keys and values of the first half. The
    result must equal that of the whole sequence, up to a rounding that is small compared with the effect of the first
    half.
    """
    vocabulary = model.config.get_text_config().vocab_size
    ids = (torch.arange(2 * PROBE, device=model.device) % vocabulary)[None]
    positions = torch.arange(2 * PROBE, device=model.device)[None]

    def last(part: slice, **inputs: Any) -> Tensor:
        found = model(input_ids=ids[:, part], position_ids=positions[:, part], use_cache=False, **inputs)
        return found.logits[:, -PROBE:].float()

    half, rest = slice(PROBE), slice(PROBE, None)
    first = _Continued()
    try:
        last(half, head_exchange=first)
        second = _Continued(first.states)
        found = last(rest, head_exchange=second)
    except TypeError:  # the model takes no position ids, or no further arguments
        return False
    whole, alone = last(slice(None)), last(rest)
    error = (found - whole).norm()
    is_passed = 0 < len(first.states) == len(second.states)
    return is_passed and bool(error <= torch.finfo(model.dtype).eps ** 0.5 * (alone - whole).norm())


def checkpoint_gradients(model: Any, layers: int | None = None, offload: bool = False) -> None:
    """Recompute activations in the backward pass instead of storing them.

    Transformers' layers do this only in training mode, so these layers are switched to it. All other modules, including
    attention with its dropout, stay in evaluation mode, because the log-probs of training must equal those of sampling.

    Args:
        layers: number of layers that are recomputed. They are the first ones, since the backward pass frees the stored
            activations of the last layers before it recomputes the first ones. None: all.
        offload: store the inputs of recomputed layers, [B, L, width] each, in CPU memory until the backward pass needs
            them, page-locked if there is a GPU.

    Raises:
        UserError: the model does not have this number of layers, or its layers are not those of Transformers.
    """
    # The first name is that of Transformers 6; the second is that of early 5.x, which later versions deprecate.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    model.eval()
    for module in model.modules():
        if hasattr(module, "gradient_checkpointing"):
            module.training = True
    if layers is not None:
        for layer in _layers_after(model, layers):
            layer.gradient_checkpointing = layer.training = False
    if offload:
        _offload_inputs(model)


def _layers_after(model: Any, count: int) -> list[Any]:
    """Return the layers of a model after the first `count`."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model  # without the layers of an image encoder
    layers = _outermost(decoder, GradientCheckpointingLayer)
    if not layers:
        raise UserError(
            f"trainer.recomputed_layers={count}: {type(model).__name__} recomputes all its layers or none; set "
            "trainer.recomputed_layers=null"
        )
    if count > len(layers):
        raise UserError(
            f"trainer.recomputed_layers={count} is more than the {len(layers)} layers of {type(model).__name__}; lower "
            "it, or set trainer.recomputed_layers=null for all"
        )
    return layers[count:]


def _outermost(module: Any, kind: type) -> list[Any]:
    """Return the modules of a kind inside of `module` that are not inside of another one of that kind."""
    if isinstance(module, kind):
        return [module]
    return [found for child in module.children() for found in _outermost(child, kind)]


def _offload_inputs(model: Any) -> None:
    recomputed = [module for module in model.modules() if hasattr(module, CHECKPOINT)]
    if not recomputed:
        raise UserError(
            f"trainer.activation_offload=true: the layers of {type(model).__name__} are not recomputed by "
            "Transformers, so that their inputs cannot be moved; set it to false"
        )
    for module in recomputed:
        setattr(module, CHECKPOINT, partial(_with_input_on_cpu, getattr(module, CHECKPOINT)))


def _with_input_on_cpu(checkpoint: Callable[..., Any], function: Callable[..., Any], *args: Any) -> Any:
    """Return `checkpoint(function, *args)`, which saves nothing but its arguments. `save_on_cpu` copies them in the
    stream of the computation, in which a GPU may use their memory for the next layer without another wait."""
    with save_on_cpu(pin_memory=True):  # without a GPU it copies to memory that is not page-locked
        return checkpoint(function, *args)
