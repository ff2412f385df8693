"""Sizes of small models. Not a test; tests of models and of learning import it."""

SIZES = {
    "vocab_size": 90,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
"""Sizes of a model with rotary positions, with weights so large that logits differ visibly."""

SMALLER_POLICY = (
    "model.tiny.hidden_size=64",
    "model.tiny.intermediate_size=128",
    "model.tiny.heads=2",
    "model.warm_start.demonstrations=1024",
    "evaluation.every_steps=0",
    "evaluation.rows=100",
    "tracker.plots=false",
    "preflight.at_start=none",
)
"""Overrides for a run that learns in a quarter of the default policy's time."""
