"""Logits where they are needed and nowhere else: a vocabulary is wide, and most positions are never looked at."""

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
    """Logits [N, V] at the positions `chosen`: a mask [B, L], or a pair of index tensors [N].

    The whole module runs, so that hooks on its root fire (FSDP2's among them) and whatever it does to logits after its
    head is done; the head itself sees the chosen positions only.
    """
    head = model.get_output_embeddings()
    handle = head.register_forward_pre_hook(lambda module, args: args[0][chosen])
    try:
        return model(**inputs).logits
    finally:
        handle.remove()


class Tail:
    """What a causal LM does after its body: the head, and whatever follows it (soft caps, scales, a cut).

    It is the model's own forward around a body that does not run again, so it can be called in parts, and again in the
    backward pass, without a rule for any architecture.
    """

    def __init__(self, causal_lm: Any, forward: Callable[[], Any], bodies: dict[nn.Module, Any]):
        """`forward` is the model's, with its inputs; `bodies` are the outputs of what must not run again."""
        self._head: nn.Module = causal_lm.get_output_embeddings()
        self._forward, self._bodies = forward, bodies
        inside = {id(parameter) for body in bodies for parameter in body.parameters()}
        outside = (p for p in causal_lm.parameters() if id(p) not in inside)
        self.weights = [p for p in dict.fromkeys([*self._head.parameters(), *outside]) if p.requires_grad]
        """Trainable parameters that logits depend on besides the hidden states."""

    def __call__(self, hidden: Tensor) -> Tensor:
        """Logits [N, V] of hidden states [N, H], as they reach the head."""
        with ExitStack() as stack:
            for body, output in self._bodies.items():
                stack.enter_context(_forward_as(body, lambda *_, kept=output, **__: kept))
            stack.enter_context(self._head.register_forward_pre_hook(lambda *_: (hidden[None],)))
            return self._forward().logits.squeeze(0)  # indexing would copy its gradient


def with_tail(model: Any, chosen: Tensor, work: Callable[[Tensor, Tail], T], **inputs: Any) -> T:
    """`work(hidden, tail)` within the forward of `model`, where weights are gathered (FSDP2): what it returns.

    `hidden` [N, H] are the states that the head would have seen at `chosen`, a mask [B, L] with at least one True.
    The tensors that `work` returns are the outputs of the root, so that hooks on their gradients fire.

    Raises:
        UserError: the model's tail cannot be called apart from its body. The first of the positions goes both ways,
            so what is not told is right.
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

    with _forward_as(causal_lm, forward):
        return model(**inputs)


def refuse_apart(modules: list[nn.Module]) -> None:
    """Find modules that FSDP2 gathers on their own: each further call would be a collective that other ranks miss.

    Raises:
        UserError: there is one.
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
    """Whether the tail gives these logits, up to rounding; two that are not finite in the same places are the same."""
    found = tail(hidden)
    rounding = 8 * torch.finfo(logits.dtype).eps
    return found.shape == logits.shape and torch.allclose(found, logits, rounding, rounding, equal_nan=True)


@contextmanager
def _forward_as(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Meanwhile `module` runs `forward` instead of its own; its hooks fire."""
    own = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own
