"""Bounds of numeric keys: the tables and the check."""

from __future__ import annotations

from omegaconf import DictConfig, OmegaConf

from mtrl.errors import UserError

OPTIMIZERS = ("trainer.optimizer", "algorithm.critic.optimizer")
SERVERS = ("generator.vllm", "generator.sglang")

AT_LEAST = {
    0: (
        "trainer.max_steps",
        *(f"{optimizer}.{key}" for optimizer in OPTIMIZERS for key in ("warmup_steps", "weight_decay", "min_lr_ratio")),
        "trainer.checkpoint.every_steps",
        "trainer.save_trajectories_every",
        "evaluation.every_steps",
        "evaluation.sampled_rows",
        "evaluation.keep_disagreements",
        "evaluation.endpoint.retries",
        *(f"evaluation.endpoint.price.{key}" for key in ("input", "cached", "output")),
        "tracker.trajectories",
        "data.validation_rows",
        "algorithm.gamma",
        "algorithm.gae_lambda",
        "algorithm.critic.warmup_steps",
        "algorithm.clip_low_threshold",
        "algorithm.kl_loss_coef",
        "algorithm.kl_reward_coef",
        "algorithm.correction_low",
        "algorithm.dynamic_sampling_rounds",
        "environment.retries",
        "generator.agent.port",
        "async_config.max_steps_off_policy",
        "model.lora_rank",
        *(f"{server}.{key}" for server in SERVERS for key in ("retries", "restarts", "canary_tolerance")),
    ),
    1: (
        "trainer.prompts_per_step",
        "trainer.mini_batches",
        "trainer.update_epochs",
        "trainer.max_tokens_per_microbatch",
        "trainer.max_logits_per_chunk",
        "trainer.profile_step",
        "trainer.fsdp.replicas",
        *(f"placement.{key}" for key in ("machines", "gpus", "ranks")),
        "async_config.max_concurrent_groups",
        "model.lora_alpha",
        *(f"{server}.{key}" for server in SERVERS for key in ("replicas", "tensor_parallel_size")),
        "trainer.threads",
        "trainer.checkpoint.keep_last",
        "trainer.max_steps_without_signal",
        "evaluation.rows",
        "evaluation.samples_per_row",
        "evaluation.endpoint.max_concurrent",
        *(f"evaluation.endpoint.budget.{key}" for key in ("requests", "tokens")),
        "algorithm.group_size",
        "algorithm.clip_high_threshold",
        "algorithm.dual_clip",
        "algorithm.max_sequence_length",
        "algorithm.passk.k",
        "algorithm.kl_horizon",
        "generator.max_turns",
        "generator.max_num_seqs",
        *(f"generator.agent.{key}" for key in ("max_concurrent", "max_calls", "max_calls_at_once")),
        "generator.max_context_length",
        "generator.sampling_params.max_generate_length",
        "generator.eval_sampling_params.max_generate_length",
        "environment.max_workers",
        "data.max_train_rows",
        "data.max_test_rows",
        "data.synthetic_train_rows",
        "data.synthetic_test_rows",
    ),
    5: ("diagnosis.window",),
}
"""Smallest allowed value -> the keys that have this lower bound; null is allowed where the type allows it."""

ABOVE_ZERO = (
    "trainer.epochs",
    "placement.gpu_memory",
    *(f"{optimizer}.{key}" for optimizer in OPTIMIZERS for key in ("lr", "max_grad_norm")),
    "generator.sampling_params.temperature",
    "generator.sampling_params.top_p",
    "environment.step_timeout",
    "environment.episode_timeout",
    "generator.agent.max_requests_per_second",
    "evaluation.endpoint.timeout",
    "evaluation.endpoint.budget.usd",
    "trainer.fsdp.timeout",
    *(f"{server}.{key}_timeout" for server in SERVERS for key in ("start", "request", "sync")),
    "generator.gpu_memory_utilization",
    "algorithm.is_cap",
    "algorithm.critic.value_clip",
    "algorithm.sapo.tau_positive",
    "algorithm.sapo.tau_negative",
    "algorithm.dppo.delta_low",
    "algorithm.dppo.delta_high",
    "algorithm.kl_target",
    "algorithm.correction_high",
)
AT_MOST_ONE = (
    "generator.sampling_params.top_p",
    "generator.gpu_memory_utilization",
    "algorithm.clip_low_threshold",
    "algorithm.gamma",
    "algorithm.gae_lambda",
    *(f"{optimizer}.min_lr_ratio" for optimizer in OPTIMIZERS),
    "environment.max_failed_share",
)
BETWEEN_0_AND_1 = ("evaluation.confidence",)
WHY = {
    "evaluation.confidence": "0.95 is the usual level",
    "evaluation.rows": "every evaluation plays them, greedily",
    "generator.sampling_params.temperature": "greedy trajectories of one prompt are all the same and teach nothing",
    "algorithm.clip_low_threshold": "it is a bound on the probability ratio, 0.8 for an epsilon of 0.2",
    "algorithm.clip_high_threshold": "it is a bound on the probability ratio, 1.2 for an epsilon of 0.2",
}


_OTHERS = (*ABOVE_ZERO, *AT_MOST_ONE, *BETWEEN_0_AND_1)


def check_bounds(cfg: DictConfig) -> None:
    """Check that each number of the configuration lies within its bounds.

    Raises:
        UserError: a number is out of bounds; the message names the key, the value and the bound.
    """
    for path in dict.fromkeys([*(path for paths in AT_LEAST.values() for path in paths), *_OTHERS]):
        value = OmegaConf.select(cfg, path)
        if value is not None and (bound := broken_bound(path, value)):
            raise UserError(f"{path}={value} must be {bound}{f' ({WHY[path]})' if path in WHY else ''}")


def broken_bound(path: str, value: float) -> str | None:
    """Return the bound that a value of this key violates, in words (`at least 1`); None if it violates none."""
    lowest = next((low for low, paths in AT_LEAST.items() if path in paths), None)
    if lowest is not None and not value >= lowest:
        return f"at least {lowest}"
    if path in ABOVE_ZERO and not value > 0:
        return "above 0"
    if path in BETWEEN_0_AND_1 and not 0 < value < 1:
        return "between 0 and 1"
    return "at most 1" if path in AT_MOST_ONE and not value <= 1 else None
