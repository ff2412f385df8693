"""The limit of a conversation by the model's positions."""

import pytest
from transformers import LlamaConfig, Phi3Config

from mtrl.config.schema import Config
from mtrl.errors import UserError
from mtrl.trainer.setup.connect import check_context, context_limit

LONGROPE = Phi3Config(
    hidden_size=32,
    num_attention_heads=4,
    max_position_embeddings=96,
    original_max_position_embeddings=32,
    rope_scaling={"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4},
    pad_token_id=0,
)
"""A model whose rotary frequencies change for the whole batch where one sequence has more than 32 tokens."""


def limited(tokens):
    config = Config(run_dir="unused")
    config.generator.max_context_length = tokens
    return config


@pytest.mark.parametrize(("model", "limit"), [(LlamaConfig(max_position_embeddings=96), 96), (LONGROPE, 32)])
def test_a_conversation_has_at_most_the_positions_with_the_same_frequencies(model, limit):
    assert context_limit(limited(None), model) == limit
    assert context_limit(limited(20), model) == 20
    with pytest.raises(UserError, match=f"max_context_length={limit + 1} is more than the {limit} tokens"):
        context_limit(limited(limit + 1), model)


def test_frequencies_of_each_type_of_layer_count():
    model = LlamaConfig(max_position_embeddings=96)
    plain, longrope = {"rope_type": "default"}, {"rope_type": "longrope", "original_max_position_embeddings": 48}
    model.rope_parameters = {"sliding_attention": plain, "full_attention": longrope}
    assert context_limit(limited(None), model) == 48


def test_a_teacher_or_opponent_holds_the_conversations_of_the_policy():
    check_context(LONGROPE, 32, "distillation.teacher.path=long")
    with pytest.raises(UserError, match=r"path=long takes at most the 32 tokens after which .* up to 33; set gen.*=32"):
        check_context(LONGROPE, 33, "distillation.teacher.path=long")
