"""Router replay: the routers of a mixture choose the experts that another pass over the same tokens chose (R3,
Ma et al. 2025, 2510.11370).

The weights of the experts are still those of this model's routers, so that gradients reach the routers. There are no
rules for architectures: a router runs its own forward, in which the call of `topk` that chooses the experts returns the
given ids, and its values at these ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mtrl.errors import UserError
from mtrl.models.experts import chosen_ids, routers_of
from mtrl.models.logits import forward_as

TOP_K = (torch.topk, Tensor.topk)


class RouterReplay:
    """The routers of a model, which replay the choices of another pass.

    Raises:
        UserError: a router does not choose its experts by a call of `topk`.
    """

    def __init__(self, model: Any):
        """`model`: a causal LM of Transformers, also with adapters, before it is sharded."""
        width = model.config.get_text_config().hidden_size
        self._routers = [(router, choosing_call(router, width)) for router in routers_of(model)]

    @contextmanager
    def replaying(self, experts: Tensor) -> Iterator[None]:
        """Within this context, tokens go to these experts, also where a backward pass computes activations again.

        Args:
            experts: [B, L, layers, k] ids for the tokens of the pass, by layer with experts; a router chooses by itself
                for a token whose ids are -1.

        Raises:
            UserError: the model has another number of layers with experts.
        """
        if experts.shape[2] != len(self._routers):
            raise UserError(
                f"algorithm.router_replay=true: the engine recorded the experts of {experts.shape[2]} layers, and the "
                f"policy has {len(self._routers)} layers with experts; set algorithm.router_replay=false"
            )
        by_layer = experts.flatten(0, 1).long().unbind(1)
        with ExitStack() as stack:
            for (router, call), ids in zip(self._routers, by_layer, strict=True):
                stack.enter_context(forward_as(router, _replayed(router.forward, ids, call)))
            yield


def _replayed(forward: Callable[..., Any], ids: Tensor, call: int) -> Callable[..., Any]:
    def replay(*args: Any, **kwargs: Any) -> Any:
        with _GivenChoice(ids, call):
            return forward(*args, **kwargs)

    return replay


class _GivenChoice(TorchFunctionMode):
    """Within this mode, one call of `topk` chooses the given ids."""

    def __init__(self, ids: Tensor, call: int):
        """
        Args:
            ids: [rows, k]; -1: the call chooses by itself.
            call: number of the call, from 0.
        """
        super().__init__()
        self._ids, self._left = ids, call

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in TOP_K:
            return found
        self._left -= 1
        if self._left != -1:
            return found
        scores = args[0] if args else kwargs["input"]
        if found.indices.shape != self._ids.shape:
            raise UserError(
                f"algorithm.router_replay=true: the engine recorded {list(self._ids.shape)} choices of experts, and a "
                f"router of the policy makes {list(found.indices.shape)}; set algorithm.router_replay=false"
            )
        ids = torch.where(self._ids < 0, found.indices, self._ids)
        return torch.return_types.topk((scores.gather(-1, ids), ids))


class _TopKCalls(TorchFunctionMode):
    """Records the indices that the calls of `topk` within this mode return."""

    def __init__(self) -> None:
        super().__init__()
        self.indices: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func in TOP_K:
            self.indices.append(found.indices)
        return found


@torch.no_grad()
def choosing_call(router: nn.Module, width: int) -> int:
    """Return the number, from 0, of the call of `topk` by which a router chooses experts: the one whose indices it
    returns.

    Args:
        width: size of the hidden states.

    Raises:
        UserError: there is no such call.
    """
    try:
        weight = next(router.parameters())
        with _TopKCalls() as calls:
            output = router(torch.zeros(2, width, dtype=weight.dtype, device=weight.device))
    except Exception as error:  # a router of another kind can raise any error
        raise _cannot(router, f"its router cannot run alone: {type(error).__name__}") from error
    chosen = chosen_ids(output)
    if chosen is None:
        raise _cannot(router, "it returns no ids of experts")
    found = [number for number, indices in enumerate(calls.indices) if indices is chosen]
    if not found:
        raise _cannot(router, "it chooses them by other operations than topk")
    return found[-1]


def _cannot(router: nn.Module, why: str) -> UserError:
    return UserError(
        f"algorithm.router_replay=true cannot set the experts that {type(router).__name__} chooses ({why}); set "
        "algorithm.router_replay=false"
    )
