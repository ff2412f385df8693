"""The tiny policy with a vision tower: a model of the Qwen3-VL architecture, with its own tokenizer, template and image
processor, built on this machine."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from mtrl.config.model_schema import TinyConfig
from mtrl.models.renderer import TINY_VISION_TEMPLATE
from mtrl.models.tiny import make_model, train_tokenizer
from mtrl.models.vision import PLACEHOLDER, START, STOP, VIDEO, ImageProcessor, give_processor, prepare_vision
from mtrl.types import Message

PATCH, MERGE = 4, 2
"""Side of a patch in pixels, and number of patches along the side of the square that is one token: a token shows 8 x 8
pixels."""
PLACES = 16
"""Number of patches along each side of the grid of learned positions, between which Transformers interpolates."""
LARGEST = 2**18
"""Maximum number of pixels of an image; larger images are scaled down."""


def train_vision_tokenizer(
    conversations: Iterable[list[Message]], vocabulary: int, tags: tuple[str, ...] = ()
) -> PreTrainedTokenizerFast:
    """Train a tokenizer as `train_tokenizer` does, with the tokens of images and the image processor."""
    special = (START, PLACEHOLDER, STOP, VIDEO)
    tokenizer = train_tokenizer(conversations, vocabulary, tags, TINY_VISION_TEMPLATE, special)
    return give_processor(tokenizer, ImageProcessor(make_processor(), tokenizer))


def make_policy(sizes: TinyConfig, tokenizer: Any, seed: int) -> Any:
    """Return a tiny policy of these sizes with random weights; with a vision tower, its image processor accompanies the
    tokenizer."""
    if not sizes.vision_layers:
        return make_model(sizes, tokenizer, seed)
    give_processor(tokenizer, ImageProcessor(make_processor(), tokenizer))
    return make_vision_model(sizes, tokenizer, seed)


def make_processor() -> Any:
    """Return the image processor of the tiny policy. It does not scale images whose sides are multiples of 8 pixels."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    return Qwen2VLImageProcessorPil(
        patch_size=PATCH,
        merge_size=MERGE,
        temporal_patch_size=1,
        size={"shortest_edge": (PATCH * MERGE) ** 2, "longest_edge": LARGEST},
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    )


def make_vision_model(sizes: TinyConfig, tokenizer: Any, seed: int) -> Any:
    """Return a model of the Qwen3-VL architecture with random weights, whose vision tower is trained."""
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

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
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return prepare_vision(Qwen3VLForConditionalGeneration(config), freeze=False)
