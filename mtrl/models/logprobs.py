"""Log-probs of sampled tokens, and entropies, without the logits of all positions in memory at once.

With a vocabulary of 150,000 the logits of 16,384 tokens are 10 GB in float32, and the naive form holds several such
arrays. Above `max_logits` they are computed in chunks of positions, discarded, and computed again in the backward pass:
this costs one more pass of the head, and the memory no longer grows with the number of tokens. The idea is that of
fused linear cross-entropy (Wijmans et al., 2411.09009; Liger Kernel, 2410.10989). In contrast to it, the loss may be
any function of the log-probs, so the gradient cannot be computed in the forward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mtrl.models.logits import Tail, logits_at, with_tail


def token_logprobs(
    model: Any,
    mask: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    entropy_gradient: bool = False,
    max_logits: int = 2**27,
    kernels: Kernels | None = None,
    **inputs: Any,
) -> tuple[Tensor, Tensor]:
    """Return the log-prob of each target under the distribution at `temperature`, in the shape of `targets`, and the
    entropy [N] of that distribution.

    Up to N x V = `max_logits` the logits are one tensor [N, V], and about 5 arrays of that size exist at once. Above
    it, forward and backward hold at most 2 x `max_logits` numbers in float32 (3 x if the entropy has a gradient), plus
    the memory of the model's operations on logits after its head. The backward pass also holds the gradient of the
    head's weights and that of one chunk; for models in half precision the sum of the chunks is in float32. In both
    cases the root module runs once, so different ranks of an FSDP2 model may take different paths.

    Args:
        model: a causal LM of Transformers, or a peft model around one.
        mask: [B, L] bool mask of the positions that predict a target.
        targets: [N] ids, in the order of rows; or [N, C], for the log-probs of C ids at each position.
        temperature: divisor of the logits; 0 (greedy) counts as 1.
        entropy_gradient: whether entropies have a gradient; else they carry no graph.
        max_logits: limit of tokens x vocabulary.
        kernels: functions that read the logits of a chunk; None: those of PyTorch, without compilation.
        inputs: inputs of the model, [B, L] each.

    Raises:
        UserError: the logits exceed `max_logits`, and the model cannot compute them in parts.
    """
    scale = temperature or 1.0
    ids = targets if targets.dim() == 2 else targets[:, None]
    rows = _rows_at_once(model, len(ids), max_logits)

    def in_chunks(hidden: Tensor, tail: Tail) -> tuple[Tensor, Tensor]:
        return _Chunked.apply(hidden, tail, kernels or PLAIN, ids, rows, scale, entropy_gradient, *tail.weights)

    if rows == len(ids):
        logprobs, entropy = _logprobs(logits_at(model, mask, **inputs), ids, scale, entropy_gradient)
    else:
        logprobs, entropy = with_tail(model, mask, in_chunks, **inputs)
    return logprobs.view(targets.shape), entropy


@torch.no_grad()
def top_logprobs(
    model: Any,
    mask: Tensor,
    targets: Tensor,
    k: int,
    *,
    temperature: float = 1.0,
    max_logits: int = 2**27,
    **inputs: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return, without gradients, the log-prob [N] of each target, and ids and log-probs [N, k] of the k most probable
    tokens of its distribution, the most probable one first.

    The arguments, the memory and the error are those of `token_logprobs`.
    """
    scale, rows = temperature or 1.0, _rows_at_once(model, len(targets), max_logits)

    def in_chunks(hidden: Tensor, tail: Tail) -> tuple[Tensor, ...]:
        pairs = zip(hidden.split(rows), targets.split(rows), strict=True)
        parts = [_top(tail(states), ids, k, scale) for states, ids in pairs]
        return tuple(torch.cat(columns) for columns in zip(*parts, strict=True))

    if rows == len(targets):
        return _top(logits_at(model, mask, **inputs), targets, k, scale)
    logprobs, ids, top = with_tail(model, mask, in_chunks, **inputs)
    return logprobs, ids, top


def _rows_at_once(model: Any, positions: int, max_logits: int) -> int:
    """Return the number of positions whose logits are computed at once: all, or about equal chunks."""
    width = model.get_output_embeddings().weight.shape[0]
    if positions * width <= max_logits:
        return positions
    chunks = -(-positions // max(1, max_logits // width))
    return -(-positions // chunks)


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits if temperature == 1.0 else logits / temperature


def _top(logits: Tensor, targets: Tensor, k: int, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the result of `top_logprobs` for logits [n, V]."""
    logits = _scaled(logits, temperature)
    normaliser = torch.logsumexp(logits, -1, keepdim=True)
    top, ids = logits.topk(k)
    return (logits.gather(-1, targets[:, None]) - normaliser).squeeze(-1), ids, top - normaliser


def _logprobs(logits: Tensor, targets: Tensor, temperature: float, entropy_gradient: bool) -> tuple[Tensor, Tensor]:
    """Return log-probs [N, C] and entropies [N] in the naive form, differentiated by autograd."""
    logits = _scaled(logits, temperature)
    normaliser = torch.logsumexp(logits, -1)
    logprobs = logits.gather(-1, targets) - normaliser[:, None]
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropy = normaliser - (logits.softmax(-1) * logits).sum(-1)
    return logprobs, entropy


class _Chunked(torch.autograd.Function):
    """`_logprobs` in chunks of `rows` positions: the backward pass computes each chunk's logits again."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        tail: Tail,
        kernels: Kernels,
        targets: Tensor,
        rows: int,
        temperature: float,
        entropy_gradient: bool,
        *weights: Tensor,
    ) -> tuple[Tensor, Tensor]:
        parts = [
            kernels.forward(tail(states), ids, temperature)
            for states, ids in zip(hidden.split(rows), targets.split(rows), strict=True)
        ]
        logprobs, entropy, normaliser = (torch.cat(columns) for columns in zip(*parts, strict=True))
        ctx.save_for_backward(hidden, targets, normaliser, entropy, *weights)
        device = hidden.device.type  # the backward pass computes the logits in the dtype of the forward pass
        ctx.autocast = (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
        ctx.tail, ctx.kernels, ctx.rows = tail, kernels, rows
        ctx.temperature, ctx.entropy_gradient = temperature, entropy_gradient
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, for_logprobs: Tensor, for_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, targets, normaliser, entropy, *weights = ctx.saved_tensors
        into = torch.empty_like(hidden)
        sums = [torch.zeros_like(w, dtype=torch.promote_types(w.dtype, torch.float32)) for w in weights]
        columns = [into, hidden, targets, normaliser, entropy, for_logprobs, for_entropy]
        for gradient, *columns_of_chunk in zip(*(column.split(ctx.rows) for column in columns), strict=True):
            _pull_back(ctx, gradient, weights, sums, *columns_of_chunk)
        gradients = (total.to(w.dtype) for total, w in zip(sums, weights, strict=True))
        return into, None, None, None, None, None, None, *gradients


def _apart(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probs [n, C], and entropies and normalisers [n], of the logits [n, V] of a chunk."""
    logits = _scaled(logits, temperature)
    normaliser = torch.logsumexp(logits, -1)
    chosen = logits.gather(-1, targets)
    entropy = normaliser - logits.softmax(-1).mul_(logits).sum(-1)
    return chosen - normaliser[:, None], entropy, normaliser


def _pull_back(
    ctx: Any, into: Tensor, weights: list[Tensor], sums: list[Tensor], states: Tensor, *columns: Tensor
) -> None:
    """Compute a chunk's gradients: copy that of its states to `into`, and add those of the weights to `sums`."""
    with torch.enable_grad(), torch.autocast(*ctx.autocast):
        states = states.detach().requires_grad_()
        logits = ctx.tail(states)
    slope = ctx.kernels.backward(logits.detach(), ctx.temperature, ctx.entropy_gradient, *columns)
    found = torch.autograd.grad(logits, [states, *weights], slope, allow_unused=True)
    into.copy_(found[0])
    for total, part in zip(sums, found[1:], strict=True):
        if part is not None:
            total += part


def _slope(
    logits: Tensor,
    temperature: float,
    entropy_gradient: bool,
    targets: Tensor,
    normaliser: Tensor,
    entropy: Tensor,
    for_logprobs: Tensor,
    for_entropy: Tensor,
) -> Tensor:
    """Return the gradient [n, V] with respect to the logits, with few temporary arrays: with z = logits / temperature,
    p = softmax(z) and the entropy H, d log p_t / dz = 1_t - p for each of the C targets t, and
    dH / dz = -p (log p + H)."""
    all_targets = for_logprobs.sum(-1, keepdim=True)
    slope = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
    if temperature != 1.0:
        slope /= temperature
    slope -= normaliser[:, None]
    if entropy_gradient:
        likely = slope.exp()
        slope.add_(entropy[:, None]).mul_(-for_entropy[:, None]).sub_(all_targets).mul_(likely)
    else:
        slope.exp_().mul_(-all_targets)
    slope = _added_at(targets, slope, for_logprobs)
    if temperature != 1.0:
        slope /= temperature
    return slope.to(logits.dtype)


def _added_at(targets: Tensor, slope: Tensor, values: Tensor) -> Tensor:
    """Return `slope` [n, V] with `values` [n, C] added at `targets` [n, C]."""
    if not torch.compiler.is_compiling() or targets.shape[1] > 1:
        return slope.scatter_add_(-1, targets, values)
    columns = torch.arange(slope.shape[1], device=slope.device)  # compiled code does this in its pass over the logits
    return torch.where(columns == targets, slope + values, slope)


@dataclass(frozen=True)
class Kernels:
    """The functions that read the logits of a chunk. Each operation of PyTorch reads all of them, and most write as
    many numbers; compiled code joins the operations."""

    forward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    """`_apart`."""
    backward: Callable[..., Tensor]
    """`_slope`."""


PLAIN = Kernels(_apart, _slope)


def compiled_kernels(backend: str = "inductor") -> Kernels:
    """Return kernels that PyTorch compiles when they are called first, for chunks of any size."""
    return Kernels(*(torch.compile(function, backend=backend, dynamic=True) for function in (_apart, _slope)))
