"""The experts of a mixture: how many tokens the routers send to each of them, and the loss that balances them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mtrl.utils.expert_ids import dtype_of

ROUTERS = "router_logits"
"""Name under which Transformers records the outputs of routers."""

Routing = list[tuple[Tensor, Tensor]]
"""For each layer with experts, the router's logits [rows, E] and the ids [rows, k] of the chosen experts."""


def routers_of(model: Any) -> list[nn.Module]:
    """Return the routers of a causal LM of Transformers, also with adapters or shards, in the order of its layers. The
    result is empty for a dense model, and for an architecture that does not name its routers."""
    recorders = [getattr(part, "_can_record_outputs", None) or {} for part in model.modules()]
    classes = {getattr(each.get(ROUTERS), "target_class", None) for each in recorders if isinstance(each, dict)} - {
        None
    }
    return [part for part in model.modules() if isinstance(part, tuple(classes))]


def chosen_ids(output: Any) -> Tensor | None:
    """Return the ids [rows, k] of the experts in the output of a router; None if it returns none."""
    return output[2] if isinstance(output, tuple) and len(output) == 3 and not output[2].is_floating_point() else None


@contextmanager
def recorded(routers: Sequence[nn.Module]) -> Iterator[Routing]:
    """Yield a list to which each router of these adds its output, layer by layer. Routers that return no ids of experts
    add nothing."""
    found: Routing = []

    def note(router: nn.Module, args: Any, output: Any) -> None:
        if (ids := chosen_ids(output)) is not None:
            found.append((output[0], ids))

    handles = [router.register_forward_hook(note) for router in routers]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def chosen_experts(routing: Routing) -> Tensor:
    """Return the ids [rows, layers, k] of the chosen experts, in the narrowest dtype."""
    dtype = getattr(torch, dtype_of(max(logits.shape[-1] for logits, _ in routing)))
    return torch.stack([ids.to(dtype) for _, ids in routing], 1)


def expert_tokens(routing: Routing, mask: Tensor) -> Tensor:
    """Return the number of tokens [layers, E] (float64) that each expert gets.

    Args:
        mask: [rows] bool mask of the tokens that count.
    """
    counts = [torch.bincount(ids[mask].flatten(), minlength=logits.shape[-1]) for logits, ids in routing]
    return torch.stack(counts).double().cpu()


def balance_loss(routing: Routing, mask: Tensor) -> Tensor:
    """Return the load-balancing loss of Switch Transformer (Fedus et al. 2021, 2101.03961, equations 4 to 6), the mean
    over layers of E sum_e f_e P_e, with the mean router probability P_e and the mean number f_e of choices of an expert
    per token. With k choices of a token it is k if all experts get the same number of tokens, and at most E.

    Args:
        mask: [rows] bool mask of the tokens that count, at least one.
    """
    losses = []
    for logits, ids in routing:
        experts = logits.shape[-1]
        chosen = torch.bincount(ids[mask].flatten(), minlength=experts) / mask.sum()
        losses.append(experts * (chosen * logits[mask].float().softmax(-1).mean(0)).sum())
    return torch.stack(losses).mean()
