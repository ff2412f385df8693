"""The tiny policy with a vision tower: a model of the Qwen3-VL architecture, with its own tokenizer, template and image
processor, built on this machine."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast, Qwen3VLConfig, Qwen3VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from mtrl.config.model_schema import TinyConfig
from mtrl.models.renderer import TinyRenderer
from mtrl.models.tiny import train_tokenizer
from mtrl.models.vision import PLACEHOLDER, ImageProcessor, give_processor, prepare_vision
from mtrl.types import Message
from mtrl.utils.images import content_text

START, STOP, VIDEO = "<|vision_start|>", "<|vision_end|>", "<|video_pad|>"
TINY_VISION_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}<|end|>{% endgeneration %}"
    "{% else %}{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""The tiny policy's chat template for messages with images; one placeholder stands for each image."""
PATCH, MERGE = 4, 2
"""Side of a patch in pixels, and number of patches along the side of the square that is one token: a token shows 8 x 8
pixels."""
PLACES = 16
"""Number of patches along each side of the grid of learned positions, between which Transformers interpolates."""
LARGEST = 2**18
"""Maximum number of pixels of an image; larger images are scaled down."""


class TinyVisionRenderer(TinyRenderer):
    """Renders messages with images to the same ids as `TINY_VISION_TEMPLATE` (a test compares them)."""

    def __init__(self, tokenizer: Any):
        super().__init__(tokenizer)
        self._image = tokenizer.convert_tokens_to_ids([START, PLACEHOLDER, STOP])

    def _content_ids(self, message: Message) -> list[int]:
        content = message.get("content")
        if not isinstance(content, list):
            return super()._content_ids(message)
        parts = (self._image if part["type"] == "image" else self._encode(content_text([part])) for part in content)
        return [token for part in parts for token in part]


def train_vision_tokenizer(
    conversations: Iterable[list[Message]], vocabulary: int, tags: tuple[str, ...] = ()
) -> PreTrainedTokenizerFast:
    """Train a tokenizer as `train_tokenizer` does, with the tokens of images and the image processor."""
    special = (START, PLACEHOLDER, STOP, VIDEO)
    tokenizer = train_tokenizer(conversations, vocabulary, tags, TINY_VISION_TEMPLATE, special)
    return give_processor(tokenizer, ImageProcessor(make_processor(), tokenizer))


def make_processor() -> Any:
    """Return the image processor of the tiny policy. It does not scale images whose sides are multiples of 8 pixels."""
    return Qwen2VLImageProcessorPil(
        patch_size=PATCH,
        merge_size=MERGE,
        temporal_patch_size=1,
        size={"shortest_edge": (PATCH * MERGE) ** 2, "longest_edge": LARGEST},
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    )


def make_vision_model(sizes: TinyConfig, tokenizer: Any, seed: int, freeze: bool = False) -> Any:
    """Return a model of the Qwen3-VL architecture with random weights.

    Args:
        freeze: whether the vision tower keeps its weights.
    """
    head = sizes.hidden_size // sizes.heads
    axis = head // 6
    config = Qwen3VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": sizes.hidden_size,
            "intermediate_size": sizes.intermediate_size,
            "num_hidden_layers": sizes.layers,
            "num_attention_heads": sizes.heads,
            "num_key_value_heads": sizes.heads,
            "head_dim": head,
            "max_position_embeddings": sizes.context,
            "initializer_range": sizes.init_std,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10_000.0,
                "mrope_section": [head // 2 - 2 * axis, axis, axis],  # frequencies of time, height and width
                "mrope_interleaved": True,
            },
            "tie_word_embeddings": True,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        },
        vision_config={
            "depth": sizes.vision_layers,
            "hidden_size": sizes.hidden_size,
            "intermediate_size": sizes.intermediate_size,
            "num_heads": sizes.heads,
            "patch_size": PATCH,
            "spatial_merge_size": MERGE,
            "temporal_patch_size": 1,
            "out_hidden_size": sizes.hidden_size,
            "num_position_embeddings": PLACES**2,
            "deepstack_visual_indexes": [0],
            "initializer_range": sizes.init_std,
        },
        image_token_id=tokenizer.convert_tokens_to_ids(PLACEHOLDER),
        video_token_id=tokenizer.convert_tokens_to_ids(VIDEO),
        vision_start_token_id=tokenizer.convert_tokens_to_ids(START),
        vision_end_token_id=tokenizer.convert_tokens_to_ids(STOP),
        initializer_range=sizes.init_std,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return prepare_vision(Qwen3VLForConditionalGeneration(config), freeze)
