"""Logits at selected positions only, since the vocabulary is large and the logits of most positions are not used."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from mtrl.errors import UserError

T = TypeVar("T")


def logits_at(model: Any, chosen: Any, **inputs: Any) -> Tensor:
    """Return the logits [N, V] at the positions `chosen`: a mask [B, L], or a pair of index tensors [N].

    The whole module runs, so that hooks on its root fire (also FSDP2's) and operations on logits after the head are
    applied; only the head is restricted to the chosen positions.
    """
    head = model.get_output_embeddings()
    handle = head.register_forward_pre_hook(lambda module, args: args[0][chosen])
    try:
        return model(**inputs).logits
    finally:
        handle.remove()


class Tail:
    """The part of a causal LM after its body: the head, and the operations after it (soft caps, scales, a cut).

    It calls the model's own forward with the body replaced by its stored output. So it can be called for parts of the
    positions, and again in the backward pass, without a rule for each architecture.
    """

    def __init__(self, causal_lm: Any, forward: Callable[[], Any], bodies: dict[nn.Module, Any]):
        """`forward` is the model's forward with its inputs bound; `bodies` maps modules that must not run again to
        their outputs."""
        self._head: nn.Module = causal_lm.get_output_embeddings()
        self._forward, self._bodies = forward, bodies
        inside = {id(parameter) for body in bodies for parameter in body.parameters()}
        outside = (p for p in causal_lm.parameters() if id(p) not in inside)
        self.weights = [p for p in dict.fromkeys([*self._head.parameters(), *outside]) if p.requires_grad]
        """Trainable parameters on which logits depend, in addition to the hidden states."""

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return the logits [N, V] of hidden states [N, H], the inputs of the head."""
        with ExitStack() as stack:
            for body, output in self._bodies.items():
                stack.enter_context(forward_as(body, lambda *_, stored=output, **__: stored))
            stack.enter_context(self._head.register_forward_pre_hook(lambda *_: (hidden[None],)))
            return self._forward().logits.squeeze(0)  # the gradient of indexing would be a copy


def with_tail(model: Any, chosen: Tensor, work: Callable[[Tensor, Tail], T], **inputs: Any) -> T:
    """Return `work(hidden, tail)`, called within the forward of `model`, where weights are gathered (FSDP2).

    `hidden` [N, H] are the inputs of the head at `chosen`, a mask [B, L] with at least one True. The tensors that
    `work` returns are the outputs of the root, so that hooks on their gradients fire.

    Raises:
        UserError: the model's tail cannot be called separately from its body. The logits of the first position are
            computed both ways and compared, so a model that would give other logits raises this error.
    """
    causal_lm = model.get_base_model() if hasattr(model, "get_base_model") else model
    head = causal_lm.get_output_embeddings()
    candidates = [body for body in (causal_lm.base_model, causal_lm.get_decoder()) if body is not causal_lm]
    refuse_apart([head, *candidates])
    plain = causal_lm.forward

    def forward(*args: Any, **kwargs: Any) -> T:
        seen: list[Tensor] = []
        bodies: dict[nn.Module, Any] = {}

        def first_only(module: nn.Module, args: Any) -> Any:
            seen.append(args[0][chosen])
            return (seen[0][:1][None].detach(),)

        with ExitStack() as stack:
            stack.enter_context(head.register_forward_pre_hook(first_only))
            for body in candidates:
                stack.enter_context(body.register_forward_hook(lambda body, _, output: bodies.update({body: output})))
            first = plain(*args, **kwargs).logits[0].detach()
        tail = Tail(causal_lm, lambda: plain(*args, **kwargs), bodies)
        if len(seen) != 1 or not bodies or not _same(tail, seen[0][:1].detach(), first):
            raise UserError(
                f"{type(causal_lm).__name__} does something around its head that cannot be done for a part of the "
                "positions; raise trainer.max_logits_per_chunk, or lower trainer.max_tokens_per_microbatch"
            )
        return work(seen[0], tail)

    with forward_as(causal_lm, forward):
        return model(**inputs)


def refuse_apart(modules: list[nn.Module]) -> None:
    """Check that FSDP2 does not gather these modules separately from the root, since each additional call would be a
    collective that other ranks do not make.

    Raises:
        UserError: a module is sharded separately.
    """
    if "torch.distributed.fsdp" not in sys.modules:
        return
    from torch.distributed.fsdp import FSDPModule

    if any(isinstance(module, FSDPModule) for module in modules):
        raise UserError(
            "the head or the body of the model was given to fully_shard apart from its root, so log-probs cannot be "
            "computed in chunks; shard decoder layers and the root alone, or raise trainer.max_logits_per_chunk"
        )


@torch.no_grad()
def _same(tail: Tail, hidden: Tensor, logits: Tensor) -> bool:
    """Return whether the tail gives these logits, up to rounding; infinities and NaN at the same places count as
    equal."""
    found = tail(hidden)
    rounding = 8 * torch.finfo(logits.dtype).eps
    return found.shape == logits.shape and torch.allclose(found, logits, rounding, rounding, equal_nan=True)


@contextmanager
def forward_as(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Within this context, `module` runs `forward` instead of its own forward; its hooks still fire."""
    own = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own
