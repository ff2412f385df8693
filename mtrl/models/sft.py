"""Supervised fine-tuning on conversations, with loss on the assistant's tokens only."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from mtrl.config.derived import LOGITS
from mtrl.errors import UserError
from mtrl.models.attention import OWN, attention_of
from mtrl.models.logits import logits_at
from mtrl.models.logprobs import token_logprobs
from mtrl.models.packing import Row, pack, partition, shared_prefixes
from mtrl.models.vision import ImageProcessor, Patches, image_inputs, repeated
from mtrl.types import Demonstration, images_in

MAX_TOKENS = 4096
"""Default maximum number of tokens of one forward and backward pass, padding included."""
MAX_GRAD_NORM = 1.0


@dataclass(frozen=True)
class Example:
    """One rendered conversation: ids [L], and a mask [L] that is True for the assistant's tokens."""

    ids: list[int]
    mask: list[bool]
    images: tuple[Patches, ...] = ()
    """Patches of the images of the conversation, in the order of their placeholders."""


def to_example(renderer: Any, chat: Demonstration) -> Example:
    """Render a conversation; the mask marks the tokens that a model would have sampled."""
    messages = chat.messages
    rendered = renderer.render(messages, tools=chat.tools or None)
    mask = rendered.sampled_mask or [
        messages[i]["role"] == "assistant" if i >= 0 else False for i in rendered.message_indices
    ]
    return Example(rendered.token_ids, list(mask))


def to_image_example(renderer: Any, processor: ImageProcessor, chat: Demonstration) -> Example:
    """Like `to_example`, for a conversation that may hold images. Placeholders are never trained."""
    plain, images = to_example(renderer, chat), images_in(chat.messages)
    counts = processor.repeats(plain.ids, images)
    patches = tuple(processor.patches(image) for image in images)
    return Example(repeated(plain.ids, counts), repeated(plain.mask, counts), patches)


class MixedOptimizer:
    """Muon (Jordan et al. 2024) for the inner matrices and AdamW for embeddings, norms and heads; or AdamW for all."""

    def __init__(self, model: Any, muon_lr: float | None, adam_lr: float):
        outer = {id(p) for module in model.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}
        outer |= {id(p) for p in model.get_output_embeddings().parameters()}
        inner = [p for p in model.parameters() if muon_lr and p.ndim == 2 and id(p) not in outer]
        chosen = {id(p) for p in inner}
        rest = [p for p in model.parameters() if id(p) not in chosen]
        self.parts: list[torch.optim.Optimizer] = [torch.optim.AdamW(rest, lr=adam_lr, weight_decay=0.0)]
        self._lrs = [adam_lr]
        if inner and muon_lr:
            self.parts.append(torch.optim.Muon(inner, lr=muon_lr, weight_decay=0.0))
            self._lrs.append(muon_lr)

    def step(self, scale: float) -> None:
        """Make one update at `scale` times the learning rates."""
        for part, lr in zip(self.parts, self._lrs, strict=True):
            part.param_groups[0]["lr"] = lr * scale
            part.step()
            part.zero_grad(set_to_none=True)

    def state_dict(self) -> list[dict[str, Any]]:
        return [part.state_dict() for part in self.parts]

    def load_state_dict(self, states: Sequence[dict[str, Any]]) -> None:
        for part, state in zip(self.parts, states, strict=True):
            part.load_state_dict(state)


def fine_tune(
    model: Any,
    next_batch: Callable[[], Sequence[Example]],
    steps: int,
    optimizer: MixedOptimizer,
    warmup: int = 20,
    max_tokens: int = MAX_TOKENS,
    on_step: Callable[[int, float], None] = lambda step, loss: None,
) -> list[float]:
    """Train for `steps` updates of one batch each, with linear warm-up and decay.

    Returns:
        The mean loss per assistant token of each update.
    """
    losses = []
    for step in range(steps):
        scale = min(1.0, (step + 1) / warmup) * (1 - step / steps)
        losses.append(update(model, next_batch(), optimizer, scale, max_tokens))
        on_step(step, losses[-1])
    model.eval()
    return losses


def update(
    model: Any,
    batch: Sequence[Example],
    optimizer: MixedOptimizer,
    scale: float = 1.0,
    max_tokens: int = MAX_TOKENS,
    max_logits: int | None = None,
) -> float:
    """Make one update on a batch, at `scale` times the learning rates.

    Args:
        max_tokens: maximum number of tokens of one forward and backward pass, padding included.
        max_logits: maximum number of logits (tokens x vocabulary) in memory at once; None: that of the device.

    Returns:
        The mean loss per assistant token, before the update.

    Raises:
        UserError: the loss or the gradient norm is not finite; the weights are those before the update.
    """
    model.train()
    packs = attention_of(model) == OWN
    total = sum(sum(example.mask) for example in batch)
    loss_sum = 0.0
    for micro in (by_prefix if packs else by_length)(batch, max_tokens):
        grid = packed(micro) if packs else padded(micro)
        images = [image for example in micro for image in example.images]
        loss = _token_losses(model, grid, images, max_logits or LOGITS.get(model.device.type, 2**27)).sum() / total
        loss.backward()
        loss_sum += loss.item()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM).item()
    if not (math.isfinite(loss_sum) and math.isfinite(norm)):
        raise UserError(
            f"fine-tuning has a loss of {loss_sum} and a gradient norm of {norm}; lower the learning rate, --lr of "
            "mtrl sft or model.warm_start.lr and model.warm_start.muon_lr of a run"
        )
    optimizer.step(scale)
    return loss_sum


def by_length(examples: Sequence[Example], max_tokens: int) -> list[list[Example]]:
    """Return micro-batches of examples of similar length, each of at most `max_tokens` tokens with padding, or of a
    single longer example."""
    out: list[list[Example]] = []
    for example in sorted(examples, key=lambda e: -len(e.ids)):
        if out and (len(out[-1]) + 1) * len(out[-1][0].ids) <= max_tokens:
            out[-1].append(example)
        else:
            out.append([example])
    return out


def by_prefix(examples: Sequence[Example], max_tokens: int) -> list[list[Example]]:
    """Return packs of examples, those with a common prefix in the same pack, each of at most `max_tokens` tokens or of
    a single longer example."""
    plans = partition([[_row(example)] for example in examples], max_tokens)
    return [[examples[index] for index in plan] for plan in plans]


def _row(example: Example) -> Row:
    return np.array(example.ids), np.array(example.mask)


Grid = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""Ids, mask and positions of examples, [B, L] each; positions None: 0 to L-1 in every row."""


def padded(examples: Sequence[Example]) -> Grid:
    """Return a row for each example, padded on the right. Attention is causal, so no token attends to padding."""
    width = max(len(e.ids) for e in examples)
    ids = torch.tensor([e.ids + [0] * (width - len(e.ids)) for e in examples])
    return ids, torch.tensor([e.mask + [False] * (width - len(e.mask)) for e in examples]), None


def packed(examples: Sequence[Example]) -> Grid:
    """Return one row with the examples laid end to end, without shared prefixes."""
    rows = [_row(example) for example in examples]
    ids, mask, positions = pack(rows, shared_prefixes(rows))
    return torch.from_numpy(ids), torch.from_numpy(mask), torch.from_numpy(positions)


def _token_losses(model: Any, grid: Grid, images: Sequence[Patches], max_logits: int) -> torch.Tensor:
    """Return the cross-entropy of each assistant token of the examples, [N]."""
    ids, mask, positions = (part if part is None else part.to(model.device) for part in grid)
    chosen = mask[:, 1:]
    placed = {} if positions is None else {"position_ids": positions[:, :-1]}
    inputs, targets = {"input_ids": ids[:, :-1], "use_cache": False, **placed}, ids[:, 1:][chosen]
    if images:
        inputs |= image_inputs((ids == model.config.image_token_id)[:, :-1] & ~mask[:, :-1], images)
    if len(targets) * model.get_output_embeddings().weight.shape[0] > max_logits:
        return -token_logprobs(model, chosen, targets, max_logits=max_logits, **inputs)[0]
    return F.cross_entropy(logits_at(model, chosen, **inputs).float(), targets, reduction="none")


def batches(examples: Sequence[Example], size: int, rng: random.Random) -> Callable[[], list[Example]]:
    """Return a function that draws batches of `size` examples without replacement, in a new order at every pass."""
    order: list[int] = []

    def draw() -> list[Example]:
        while len(order) < size:
            fresh = list(range(len(examples)))
            rng.shuffle(fresh)
            order.extend(fresh)
        taken = [examples[i] for i in order[:size]]
        del order[:size]
        return taken

    return draw
