"""Models that read images beside text, of the Qwen-VL families: how an image becomes tokens, and the inputs of a pass.

The image processor of the model cuts an image into patches. The vision tower of the model turns each square of
`merge_size` x `merge_size` patches into one vector, which replaces the embedding of one *placeholder*, the token
`<|image_pad|>`. Positions of these models have three axes (time, height, width; Qwen2-VL, 2409.12191, section 2.1), and
Transformers computes them from the token types and the grids of the patches.

A placeholder is a token of a message's image only. The same id in the text of the policy is an ordinary token: the
token types `mm_token_type_ids`, and not the ids, determine which tokens are placeholders.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from mtrl.errors import UserError
from mtrl.utils.images import pixels_of, size_of

T = TypeVar("T")

FAMILIES = ("qwen2_5_vl", "qwen3_vl")
"""Model types of Transformers whose image inputs mtrl computes."""
START, PLACEHOLDER, STOP = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"
"""Texts of the tokens before an image, of the image, and after it."""
VIDEO = "<|video_pad|>"
"""Text of the placeholder of videos, which configurations name and mtrl does not use."""
PROCESSOR = "mtrl_image_processor"
"""Attribute of a tokenizer that holds the image processor of its model."""
CACHED_BYTES = 2**29
"""Maximum size of the patches that are kept, in bytes, since the turns of a group show the same images."""
LONGEST = 1 << 14
"""Maximum number of tokens of one image."""


def has_vision(model_config: Any) -> bool:
    """Return whether a model with this Hugging Face configuration reads images in mtrl."""
    return getattr(model_config, "model_type", None) in FAMILIES


@dataclass(frozen=True)
class Patches:
    """The patches of an image, as the vision tower takes them."""

    values: Tensor
    """[patches, values of a patch] float32."""
    grid: tuple[int, int, int]
    """Number of patches along time (1), height and width."""
    tokens: int
    """Number of placeholders."""


class ImageProcessor:
    """The image processor of a model, with the placeholder of its tokenizer."""

    def __init__(self, processor: Any, tokenizer: Any):
        """
        Args:
            processor: an image processor of Transformers for a model of `FAMILIES`.
            tokenizer: the model's tokenizer.

        Raises:
            UserError: the tokenizer has no placeholder.
        """
        self.processor = processor
        self.placeholder: int = tokenizer.convert_tokens_to_ids(PLACEHOLDER)
        """Id of the placeholder."""
        if self.placeholder is None or self.placeholder == tokenizer.unk_token_id:
            raise UserError(
                f"the tokenizer {tokenizer.name_or_path} has no token {PLACEHOLDER}, which stands for images; give the "
                "tokenizer of the model"
            )
        self._kept: dict[str, Patches] = {}
        self._kept_bytes = 0

    def save(self, folder: Path) -> None:
        """Write the settings of the processor, which `AutoImageProcessor` reads."""
        self.processor.save_pretrained(folder)

    def tokens(self, image: str) -> int:
        """Return the number of placeholders of an image in a message. Its pixels are not decoded, since this is done
        for the images of all rows before a run, and on the event loop.

        Raises:
            ValueError: the image cannot be read, or has too many tokens.
        """
        tokens = self.processor.get_number_of_image_patches(*size_of(image)) // self.processor.merge_size**2
        if tokens > LONGEST:
            raise ValueError(f"an image has {tokens} tokens, and at most {LONGEST} are possible; show a smaller one")
        return int(tokens)

    def patches(self, image: str) -> Patches:
        """Return the patches of an image in a message.

        Raises:
            ValueError: as for `tokens`, or the pixels cannot be decoded.
        """
        found = self._kept.pop(image, None)
        if found is None:
            found = self._patches(image)
            self._kept_bytes += found.values.nbytes
        self._kept[image] = found  # the last one is the one that was used last
        while self._kept_bytes > CACHED_BYTES and len(self._kept) > 1:
            self._kept_bytes -= self._kept.pop(next(iter(self._kept))).values.nbytes
        return found

    def _patches(self, image: str) -> Patches:
        tokens = self.tokens(image)
        found = self.processor(images=[pixels_of(image)], input_data_format="channels_last", return_tensors="pt")
        time, height, width = (int(size) for size in found["image_grid_thw"][0])
        return Patches(found["pixel_values"].float(), (time, height, width), tokens)

    def repeats(self, ids: Sequence[int], images: Sequence[str]) -> list[int]:
        """Return how often each id of a rendered conversation occurs in its tokens: a placeholder, of which a template
        writes one for each image, once for each token of its image, and other ids once.

        Raises:
            ValueError: there is another number of placeholders than of images.
        """
        if (found := sum(token == self.placeholder for token in ids)) != len(images):
            raise ValueError(f"the template shows {found} placeholders for {len(images)} images")
        counts = iter([self.tokens(image) for image in images])
        return [next(counts) if token == self.placeholder else 1 for token in ids]

    def expand(self, ids: Sequence[int], images: Sequence[str]) -> list[int]:
        """Return the tokens of a rendered conversation, in which each placeholder is repeated.

        Raises:
            ValueError: as for `repeats`.
        """
        return repeated(ids, self.repeats(ids, images))


def repeated(values: Sequence[T], counts: Sequence[int]) -> list[T]:
    """Return a list in which each value is repeated."""
    return [value for value, count in zip(values, counts, strict=True) for _ in range(count)]


def load_processor(path: str, tokenizer: Any, **given: Any) -> ImageProcessor:
    """Load the image processor of a model folder or Hub name. It runs without torchvision.

    Raises:
        OSError, ValueError, ImportError: as for a model that cannot be loaded.
    """
    from transformers import AutoImageProcessor

    return ImageProcessor(AutoImageProcessor.from_pretrained(path, backend="pil", **given), tokenizer)


def give_processor(tokenizer: Any, processor: ImageProcessor) -> Any:
    """Let the image processor accompany the tokenizer of its model, and return the tokenizer."""
    setattr(tokenizer, PROCESSOR, processor)
    return tokenizer


def processor_of(tokenizer: Any) -> ImageProcessor | None:
    """Return the image processor that accompanies a tokenizer; None for a model that reads text only."""
    found: ImageProcessor | None = getattr(tokenizer, PROCESSOR, None)
    return found


def tower(model: Any) -> nn.Module:
    """Return the vision tower of a model of `FAMILIES`, with the layers that merge patches."""
    found: nn.Module = model.model.visual
    return found


def prepare_vision(model: Any, freeze: bool) -> Any:
    """Let the token types alone determine which tokens are placeholders for a model, and return the model.

    Args:
        freeze: whether the vision tower keeps its weights.
    """
    body = model.model
    body.register_forward_pre_hook(_take_types, with_kwargs=True)
    body.get_placeholder_mask = MethodType(_placeholder_mask, body)  # Transformers' own mask reads the ids
    if freeze:
        tower(model).requires_grad_(False)
    return model


def _take_types(body: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    body.mtrl_token_types = kwargs.get("mm_token_type_ids")


def _placeholder_mask(
    body: Any, input_ids: Any, inputs_embeds: Tensor, image_features: Tensor | None = None, **others: Any
) -> tuple[Tensor, Tensor]:
    """Return the masks [B, L, 1] of the placeholders of images, and of videos, of which there are none."""
    mask = body.mtrl_token_types == 1
    if image_features is not None and int(mask.sum()) != len(image_features):
        raise ValueError(f"{int(mask.sum())} placeholders stand for images of {len(image_features)} tokens")
    mask = mask[..., None].to(inputs_embeds.device)
    return mask, torch.zeros_like(mask)


def image_inputs(placeholders: Tensor, patches: Sequence[Patches]) -> dict[str, Tensor]:
    """Return the inputs of a model for the images of its tokens, beside the token ids; none without images.

    Args:
        placeholders: [B, L] bool mask of the placeholders, on the device of the model.
        patches: those of the images, row by row, in the order of their placeholders.

    Raises:
        ValueError: the images have another number of tokens than there are placeholders.
    """
    expected, found = sum(image.tokens for image in patches), int(placeholders.sum())
    if expected != found:
        raise ValueError(f"{found} placeholders stand for {len(patches)} images of {expected} tokens")
    if not patches:
        return {}
    device = placeholders.device
    return {
        "mm_token_type_ids": placeholders.int(),
        "pixel_values": torch.cat([image.values for image in patches]).to(device),
        "image_grid_thw": torch.tensor([image.grid for image in patches], device=device),
    }
