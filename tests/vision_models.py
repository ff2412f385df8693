"""Small models that read images, with random weights, and what plain Transformers computes for a conversation."""

from functools import cache
from itertools import count

import numpy as np
import torch
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from mtrl.config.model_schema import TinyConfig
from mtrl.models.plain_tokenizer import plain
from mtrl.models.tiny_vision import make_vision_model, train_vision_tokenizer
from mtrl.models.vision import PLACEHOLDER, prepare_vision, processor_of
from mtrl.trainer.setup.connect import make_codec
from mtrl.utils.images import image_part

SIZES = TinyConfig(32, 48, 2, 2, 300, 512, vision_layers=1)
WORDS = ("go up now", "the way is down", "left or right", "a wall")


@cache
def tokenizer():
    """The tokenizer of both models. Tests must not change it."""
    return train_vision_tokenizer([[{"role": "user", "content": word}] for word in WORDS], SIZES.vocabulary)


def codec():
    return make_codec(plain(tokenizer()), "auto")


def qwen3_vl():
    return make_vision_model(SIZES, tokenizer(), 0).eval()


def qwen2_5_vl():
    """A model of the other family, whose tower attends within windows and has no DeepStack."""
    ids = {
        key: tokenizer().convert_tokens_to_ids(token)
        for key, token in {
            "image_token_id": PLACEHOLDER,
            "video_token_id": "<|video_pad|>",
            "vision_start_token_id": "<|vision_start|>",
            "vision_end_token_id": "<|vision_end|>",
        }.items()
    }
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(tokenizer()),
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "bos_token_id": None,
            "eos_token_id": tokenizer().eos_token_id,
            "max_position_embeddings": 512,
            "initializer_range": 0.1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 2, 2]},
        },
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 2,
            "patch_size": 4,
            "spatial_merge_size": 2,
            "temporal_patch_size": 1,
            "window_size": 16,
            "fullatt_block_indexes": [1],
            "out_hidden_size": 32,
        },
        **ids,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return prepare_vision(Qwen2_5_VLForConditionalGeneration(config), freeze=False).eval()


FAMILIES = {"qwen3_vl": qwen3_vl, "qwen2_5_vl": qwen2_5_vl}


def picture(seed, height=16, width=24):
    """An image of random pixels, as a part of a message."""
    return image_part(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def shown(*parts, role="user"):
    """A message of texts and images."""
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return {"role": role, "content": content}


SHOWS = ((1,), (0, 2), (0,), (2, 0, 1), (1, 1))
"""Number of images in each observation of each trajectory of `conversations`."""


def conversations():
    """The observations of one trajectory for each entry of `SHOWS`, with images of several sizes."""
    seeds = count()
    return [
        [
            [shown(WORDS[turn], *(picture(next(seeds), 8 * (1 + turn), 16) for _ in range(images)), "then")]
            for turn, images in enumerate(turns)
        ]
        for turns in SHOWS
    ]


def plain_logits(model, ids, placeholders, images):
    """The logits [L, V] of one sequence from the modules of a fresh copy of the model: the tower's vectors take the
    places of `placeholders` [L] in the embeddings, and the positions are those of `get_rope_index`."""
    fresh = type(model)(model.config).eval()
    fresh.load_state_dict(model.state_dict())
    ids, types = torch.tensor([ids]), torch.tensor([placeholders]).int()
    patches = [processor_of(tokenizer()).patches(image) for image in images]
    grids = torch.tensor([each.grid for each in patches]) if images else None
    positions = fresh.model.get_rope_index(ids, mm_token_type_ids=types, image_grid_thw=grids)[0]
    inputs = {"position_ids": positions}
    embeddings = fresh.get_input_embeddings()(ids)
    if images:
        seen = fresh.model.get_image_features(torch.cat([each.values for each in patches]), grids, return_dict=True)
        embeddings = embeddings.clone()
        embeddings[types.bool()] = torch.cat(list(seen.pooler_output))
        if hasattr(seen, "deepstack_features"):
            inputs["visual_pos_masks"] = types.bool()
            inputs["deepstack_visual_embeds"] = [torch.cat(list(each)) for each in seen.deepstack_features]
    states = fresh.model.language_model(inputs_embeds=embeddings, use_cache=False, **inputs).last_hidden_state
    return fresh, fresh.lm_head(states)[0]
