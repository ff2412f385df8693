"""One forward pass over slots of the cache, for any Hugging Face causal LM."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import Cache

from mtrl.engines.local.cache import SlotCache
from mtrl.errors import UserError
from mtrl.models.attention import OWN
from mtrl.models.logits import logits_at

ATTENTION = ("sdpa", "eager", OWN)


class ModelRunner(Protocol):
    cache: SlotCache

    def forward(self, ids: Tensor, starts: Tensor, lengths: Tensor, first_slot: int, width: int) -> Tensor:
        """Feed new tokens to consecutive slots and return the logits after the last new token of each row.

        Args:
            ids: [n, t] new tokens, right-padded.
            starts: [n] number of tokens that each slot holds already.
            lengths: [n] number of new tokens per row without padding, 1..t.
            first_slot: row i uses slot `first_slot + i`.
            width: number of tokens that the longest slot holds afterwards; attention is limited to this length.

        Returns:
            Logits [n, V].
        """

    def refresh(self) -> None:
        """Discard all data derived from weights, because the module's weights have changed."""


class HfRunner:
    """Runs the module's own forward with a cache that reads and writes slots. It is slower than `FusedRunner`, but
    supports nearly every model.

    Raises:
        UserError: the model's layers need another kind of cache, or its logits with and without the cache differ.
    """

    def __init__(self, model: Any):
        config = model.config.get_text_config()
        kinds = getattr(config, "layer_types", None)
        self.model = model
        takes = inspect.signature(model.forward).parameters
        self.cache_key = "cache" if "cache" in takes else "past_key_values"
        """Name of the cache in the module's forward: `cache` since Transformers 5.24."""
        self.window = getattr(config, "sliding_window", None)
        self.mixed = kinds is not None and "sliding_attention" in kinds
        """Whether the model takes one mask per layer type."""
        if kinds is not None and not self.mixed:
            self.window = None
        if not set(kinds or ()) <= {"full_attention", "sliding_attention"} or self._attention() not in ATTENTION:
            raise self._cannot(f"layers {sorted(set(kinds or ()))}, {self._attention()} attention")
        heads = config.num_attention_heads
        self.cache = self._make_cache(
            config.num_hidden_layers,
            getattr(config, "num_key_value_heads", None) or heads,
            getattr(config, "head_dim", None) or config.hidden_size // heads,
            model.dtype,
            model.device,
        )
        self._check()

    def forward(self, ids: Tensor, starts: Tensor, lengths: Tensor, first_slot: int, width: int) -> Tensor:
        n, t = ids.shape
        positions = starts[:, None] + torch.arange(t, device=ids.device)
        rows = torch.arange(first_slot, first_slot + n, device=ids.device)[:, None]
        with evaluating(self.model):
            return logits_at(
                self.model,
                (rows[:, 0] - first_slot, lengths - 1),
                input_ids=ids,
                attention_mask=self._masks(positions, width),
                # Padding may lie beyond the last position of a learned position embedding.
                position_ids=torch.minimum(positions, (starts + lengths).max() - 1),
                use_cache=True,
                **self._cache_of(rows, positions, width, first_slot),
            )

    def refresh(self) -> None: ...

    def _make_cache(self, *sizes: Any) -> SlotCache:
        return SlotCache(*sizes)

    def _cache_of(self, rows: Tensor, columns: Tensor, width: int, first_slot: int) -> dict[str, Cache]:
        """Return the argument of the module's forward that writes the new tokens to `columns` [n, t] of the slots
        `rows` [n, 1]."""
        layers = [_SlotLayer(self.cache, i, rows, columns, width, first_slot) for i in range(len(self.cache.keys))]
        return {self.cache_key: Cache(layers=layers)}

    def _masks(self, positions: Tensor, width: int) -> Tensor | dict[str, Tensor]:
        """Return the attention mask [n, 1, t, width] to add to the scores: 0, or minus infinity where a token must not
        attend. For a model with several layer types: one mask per type."""
        at, by = torch.arange(width, device=positions.device), positions[:, None, :, None]
        full = torch.zeros(
            len(positions), 1, positions.shape[1], width, dtype=self.model.dtype, device=positions.device
        )
        full.masked_fill_(at > by, float("-inf"))
        if self.window is None:
            return full
        near = full.masked_fill(at <= by - self.window, float("-inf"))
        return {"full_attention": full, "sliding_attention": near} if self.mixed else near

    @torch.inference_mode()
    def _check(self) -> None:
        """Compare the logits of a prompt fed in two parts with those of the module's forward without a cache.

        Raises:
            UserError: the forward fails, or the logits differ.
        """
        device = self.model.device
        ids = torch.arange(7, device=device)[None] % self.model.config.get_text_config().vocab_size
        self.cache.reserve(1, ids.shape[1])
        try:
            with evaluating(self.model):
                expected = self.model(input_ids=ids, use_cache=False).logits[0, -1].float()
            for start, end in ((0, 4), (4, 7)):
                length = torch.tensor([end - start], device=device)
                got = self.forward(ids[:, start:end], torch.tensor([start], device=device), length, 0, end)[0].float()
        except Exception as error:
            raise self._cannot(repr(error)) from error
        if (got - expected).norm() > (1e-3 if self.model.dtype == torch.float32 else 0.05) * expected.norm():
            raise self._cannot("its logits change with the cache")

    def _attention(self) -> str:
        return getattr(self.model.config, "_attn_implementation", "sdpa")

    def _cannot(self, why: str) -> UserError:
        return UserError(f"generator.backend=local cannot run {type(self.model).__name__} ({why}); use vllm or sglang")


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Set the model to evaluation mode within the context: under gradient checkpointing, layers in training mode ignore
    the cache.

    Each module is set separately, because gradient checkpointing sets layers to training mode while `model.training`
    stays False.
    """
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


class _SlotLayer:
    """One layer of a cache, with the interface that a Hugging Face attention layer expects."""

    is_compileable = False
    is_sliding = False
    is_initialized = True

    def __init__(self, cache: SlotCache, layer: int, rows: Tensor, positions: Tensor, width: int, first_slot: int):
        self.cache, self.layer, self.rows, self.positions, self.width = cache, layer, rows, positions, width
        self.slots = slice(first_slot, first_slot + len(rows))

    def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.cache.write(self.layer, self.rows, self.positions, keys.transpose(1, 2), values.transpose(1, 2))
        return (
            self.cache.keys[self.layer][self.slots, :, : self.width],
            self.cache.values[self.layer][self.slots, :, : self.width],
        )

    def get_seq_length(self) -> int:
        return self.width - self.positions.shape[1]

    def get_mask_sizes(self, *args: Any) -> tuple[int, int]:
        return self.width, 0

    def get_max_cache_shape(self) -> int:
        return self.cache.capacity
