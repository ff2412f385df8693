"""The embedded engine for models that read images: a slot cache that also knows the position after each token.

In the contexts of the engine, the placeholders of an image are negative numbers made from the image's content. So two
contexts share cached tokens only where they show the same images, and the policy cannot sample a placeholder: an id
that it samples is never negative.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from mtrl.engines.base import ImagePrompt, SamplingParams
from mtrl.engines.local.cache import SlotCache
from mtrl.engines.local.engine import LocalEngine
from mtrl.engines.local.runner import HfRunner, ModelRunner, evaluating
from mtrl.models.logits import logits_at
from mtrl.models.vision import LONGEST, Patches, image_inputs, processor_of
from mtrl.types import Generation

KEY_BITS = 48
"""Number of bits of an image's hash that are in the numbers of its placeholders; 64 bits hold them beside `LONGEST`."""


class PositionedCache(SlotCache):
    """A slot cache that also stores, for each token, the position of the token after it, since an image of n tokens
    takes fewer than n positions: `following` [slots, capacity] int64."""

    def __init__(self, layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device):
        super().__init__(layers, kv_heads, head_dim, dtype, device)
        self.following = torch.zeros(0, 0, dtype=torch.int64, device=device)

    def _resize(self, slots: int, capacity: int) -> None:
        super()._resize(slots, capacity)
        old = self.following[:slots, :capacity]
        self.following = torch.zeros(slots, capacity, dtype=torch.int64, device=self.device)
        self.following[: len(old), : old.shape[1]] = old

    def move(self, sources: list[int], targets: list[int], length: int) -> None:
        super().move(sources, targets, length)
        self.following[targets, :length] = self.following[sources, :length]

    def clear(self) -> None:
        super().clear()
        self.following = self.following[:0, :0]


class VisionRunner(HfRunner):
    """Runs the forward of a model of `mtrl.models.vision.FAMILIES` over slots of the cache. Negative ids are the
    placeholders of `images`."""

    def __init__(self, model: Any, patches: Callable[[str], Patches]):
        """`patches` returns the patches of an image."""
        self.images: dict[int, str] = {}
        """The images of all open trajectories, by the id of their first placeholder."""
        self.patches = patches
        super().__init__(model)

    def _make_cache(self, *sizes: Any) -> PositionedCache:
        return PositionedCache(*sizes)

    def forward(self, ids: Tensor, starts: Tensor, lengths: Tensor, first_slot: int, width: int) -> Tensor:
        columns = starts[:, None] + torch.arange(ids.shape[1], device=ids.device)
        rows = torch.arange(first_slot, first_slot + len(ids), device=ids.device)[:, None]
        placeholders = ids < 0
        shown = [self.patches(self.images[first]) for first in ids[placeholders].tolist() if first in self.images]
        inputs = image_inputs(placeholders, shown)
        ids = ids.masked_fill(placeholders, self.model.config.image_token_id)
        following = cast(PositionedCache, self.cache).following
        begin = torch.where(starts > 0, following[rows[:, 0], starts - 1], 0)
        positions = begin[:, None] + self._positions(ids, inputs)
        following[rows, columns] = positions.amax(0).cummax(-1).values + 1
        with evaluating(self.model):
            return logits_at(
                self.model,
                (rows[:, 0] - first_slot, lengths - 1),
                input_ids=ids,
                attention_mask=self._masks(columns, width),
                position_ids=positions,
                use_cache=True,
                **inputs,
                **self._cache_of(rows, columns, width, first_slot),
            )

    def _positions(self, ids: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        """Return the positions [3, n, t] of new tokens, from 0 in each row; all three are equal for text."""
        if not inputs:
            return torch.arange(ids.shape[1], device=ids.device).expand(3, *ids.shape)
        types, grids = inputs["mm_token_type_ids"], inputs["image_grid_thw"]
        found: Tensor = self.model.model.get_rope_index(ids, mm_token_type_ids=types, image_grid_thw=grids)[0]
        return found


class VisionEngine(LocalEngine):
    """A `LocalEngine` that takes prompts with images. An image is encoded once for each trajectory that shows it, since
    its keys and values stay in the cache."""

    def __init__(self, model: Any, tokenizer: Any, *args: Any, **options: Any):
        """See `LocalEngine`; `fused_decode` and `cuda_graphs` have no effect.

        Args:
            tokenizer: a tokenizer that the model's image processor accompanies.
        """
        processor = processor_of(tokenizer)
        assert processor is not None
        self.patches = processor.patches
        super().__init__(model, tokenizer, *args, **options)

    def _make_runner(self, model: Any, fused_decode: bool, cuda_graphs: bool) -> ModelRunner:
        runner = VisionRunner(model, self.patches)
        self.images = runner.images
        return runner

    async def generate(
        self, trajectory_id: str, prompt: ImagePrompt | list[int], sampling: SamplingParams
    ) -> Generation:
        ids = self._with_images(prompt) if isinstance(prompt, ImagePrompt) else prompt
        return await super().generate(trajectory_id, ids, sampling)

    def _with_images(self, prompt: ImagePrompt) -> list[int]:
        """Return the context of a prompt, in which the numbers of placeholders identify their images."""
        ids = list(prompt.ids)
        for start, image in prompt.images:
            tokens = self.patches(image).tokens
            digest = hashlib.sha256(image.encode()).digest()
            first = -1 - (int.from_bytes(digest[: KEY_BITS // 8]) * LONGEST)
            self.images[first] = image
            ids[start : start + tokens] = range(first, first - tokens, -1)
        return ids

    def _discard_rows(self) -> None:
        super()._discard_rows()
        self.images.clear()
