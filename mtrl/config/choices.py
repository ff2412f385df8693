"""Keys that take one of a fixed set of words."""

from __future__ import annotations

WITH_TORCH = {
    "algorithm.loss_fn": (
        *("ppo", "cispo", "importance_sampling", "gspo", "sapo", "dppo", "decoupled_ppo"),
        *("reinforce_is", "regular"),
    ),
    "algorithm.off_policy_correction": ("none", "tis", "sequence_tis", "icepop", "mis", "geometric"),
    "algorithm.kl_estimator": ("k1", "k2", "k3", "k3_plus", "k1_unbiased", "k3_unbiased"),
}
"""Names in the registries of tensor functions, copied here because the registries import torch. A test compares the
two."""

REGISTERED = {
    "algorithm.advantage_method": (
        *("dr_grpo", "gae", "gdpo", "gigpo", "gpg", "group_based", "group_based_per_turn", "grpo", "grpo_passk"),
        *("maxrl", "monte_carlo", "mt_grpo", "opo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"),
        *("reinforce_pp", "reinforce_pp_baseline", "rloo", "turn_gae", "turn_rloo"),
    ),
    "algorithm.loss_reduction": (
        *("prompt_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm", "sequence_mean"),
        *("token_mean", "turn_mean"),
    ),
    **WITH_TORCH,
}
"""Names in all registries of functions, so that this package needs no registry. A test compares the two."""

ALIASES = {"reinforce_is": "importance_sampling", "regular": "ppo"}
"""Alias -> name in `WITH_TORCH`."""

CHOICES = {
    "async_config.in_flight": ("continue", "drain"),
    "async_config.on_stale": ("wait", "requeue"),
    "algorithm.credit": ("trajectory", "turn", "turn+outcome"),
    "algorithm.passk.estimator": ("pkpo_sloo1", "pkpo_sloo", "chen", "top2"),
    "algorithm.critic.optimizer.schedule": ("constant", "linear", "cosine"),
    "algorithm.dppo.divergence": ("tv", "kl"),
    "algorithm.loss_anchor": ("rollout", "old"),
    "diagnosis.live": ("warn", "stop", "none"),
    "evaluation.split": ("test", "validation", "train"),
    "generator.backend": ("local", "vllm", "sglang"),
    **{
        f"generator.{engine}.{key}": words
        for engine in ("vllm", "sglang")
        for key, words in {"weight_sync": ("disk", "distributed", "tensor"), "lora": ("merged", "adapter")}.items()
    },
    "model.name": ("tiny", "hf"),
    "model.dtype": ("float32", "bfloat16", "float16"),
    "model.attn_implementation": ("sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention"),
    "preflight.at_start": ("warn", "stop", "none"),
    "reward.level": ("turn", "trajectory"),
    "tracker.wandb.mode": ("online", "offline"),
    "trainer.fsdp.param_dtype": ("bfloat16", "float16", "float32"),
    "trainer.fsdp.reduce_dtype": ("float32", "bfloat16"),
    "trainer.optimizer.schedule": ("constant", "linear", "cosine"),
}
"""Key -> the words that it takes; null is allowed where the type allows it."""

BOUNDS = {
    "tis": (0.0, 2.0),
    "sequence_tis": (0.0, 2.0),
    "icepop": (0.5, 5.0),
    "mis": (0.5, 2.0),
    "geometric": (0.999, 1.001),
}
"""Published bounds of each off-policy correction, where `correction_low` and `correction_high` are null."""
