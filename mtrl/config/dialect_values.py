"""Tables that translate values of other frameworks' keys; `foreign.py` reads them."""

from __future__ import annotations

from collections.abc import Callable

WHEN_FALSE = {
    "generator.backend=vllm": "generator.backend=local",
    "model.dtype=bfloat16": "model.dtype=float32",
    "model.attn_implementation=flash_attention_2": "model.attn_implementation=sdpa",
    "algorithm.kl_estimator=k3_unbiased": "algorithm.kl_estimator=k3",
}
"""Our setting for a switch of another framework that is on -> our setting for the same switch turned off."""

FOREIGN_WHEN_FALSE = {
    "trainer.algorithm.use_tis": "algorithm.off_policy_correction=none",
    "vllm_importance_sampling_correction": "algorithm.off_policy_correction=none",
    "trainer.placement.colocate_all": "set generator.vllm.colocate=false or generator.sglang.colocate=false",
    "actor_rollout_ref.rollout.free_cache_engine": (
        "set generator.vllm.colocate=false or generator.sglang.colocate=false, for servers on GPUs of their own"
    ),
    "reward_model.overlong_buffer.enable": "leave reward.components.length_penalty out, which is its default",
}
"""Foreign switch whose table entry is its replacement when on -> the replacement when it is off."""


class NoEquivalentError(ValueError):
    """A foreign value has no equivalent in our key; the message names what to write instead."""


UNLIMITED = (
    "it is no limit there, and 0 is off here: set algorithm.dynamic_sampling_rounds to a number that is hardly ever "
    "reached, such as 20"
)
SEVERAL_FILES = (
    "data.path takes one file or one folder: put the files into a folder as train-1.parquet, train-2.parquet and so "
    "on, beside test.parquet, and set data.path to it, or join them"
)


def _items(value: str) -> list[str]:
    """Parse `[a,"b"]`, `a,b` or `a` into a list of texts."""
    return [item.strip().strip("'\"") for item in value.strip().removeprefix("[").removesuffix("]").split(",") if item]


def _listed(value: str) -> str:
    return f"[{','.join(_items(value))}]"


def _single_item(value: str) -> str:
    """Return the item of a list with a single item."""
    item, *more = _items(value)
    if more:
        raise NoEquivalentError(SEVERAL_FILES)
    return item


def _limit(value: str) -> str:
    """Return a limit unchanged; values of 0 or less, which mean "no limit" in other frameworks, have no equivalent."""
    if int(value) <= 0:
        raise NoEquivalentError(UNLIMITED)
    return value


def _trackers(value: str) -> str:
    """Translate names of trackers; in mtrl the console is on by default and is not listed."""
    if value == "all":
        return "[mlflow,wandb,tensorboard]"
    named = [name for name in _items(value) if name not in ("console", "none", "null")]
    if not set(named) <= {"mlflow", "wandb", "tensorboard"}:
        raise ValueError(value)
    return f"[{','.join(named)}]"


def _samples(value: str) -> str:
    """Return the setting of `evaluation.samples_per_row`: pass@k needs as many samples of a row as its largest k."""
    return f"evaluation.samples_per_row={max(map(int, _items(value)), default=1)}"


NEEDS: dict[str, Callable[[str], str]] = {"model.path": lambda _: "model=hf", "evaluation.pass_k_values": _samples}
"""Keys that have no effect alone -> function that returns, for their value, the setting that makes mtrl read them."""


def _never_as_zero(value: str) -> str:
    """Translate an interval: a negative value means "never" in other frameworks, 0 does in mtrl."""
    return "0" if int(value) < 0 else value


def _plus_one(value: str) -> str:
    """Translate a number of tool responses to a number of turns: the policy has one turn more than responses."""
    return str(int(value) + 1)


def _plus_one_if_limited(value: str) -> str:
    """Like `_plus_one`, but values below 1 mean "no limit" and cannot be translated."""
    if int(value) < 1:
        raise ValueError(value)
    return _plus_one(value)


def _one_minus(value: str) -> str:
    return f"{1 - float(value):g}"


def _one_plus(value: str) -> str:
    return f"{1 + float(value):g}"


CONVERT: dict[str, Callable[[str], str]] = {
    # Other frameworks give epsilon, the distance from 1; mtrl gives the bound on the ratio itself.
    "eps_clip_low": _one_minus,
    "eps_clip_high": _one_plus,
    "clip_ratio_low": _one_minus,
    "clip_ratio_high": _one_plus,
    "cispo_eps_clip_low": _one_minus,
    "cispo_eps_clip_high": _one_plus,
    "epsilon_high": _one_plus,
    "adam_beta1": lambda value: f"[{float(value):g},0.999]",  # beta2 stays at TRL's default
    "adam_beta2": lambda value: f"[0.9,{float(value):g}]",
    "max_tool_calling_iterations": _plus_one,
    "max_user_turns": _plus_one_if_limited,
    "max_num_gen_batches": _limit,
    "max_sample_batches": _limit,
    "logger": _trackers,
    "report_to": _trackers,
    "train_data": _single_item,
    "train_files": _single_item,
    "vllm_server_base_url": _listed,
    "pass_k_values": _listed,
    **dict.fromkeys(
        ("eval_interval", "ckpt_interval", "save_freq", "test_freq", "save_steps", "eval_steps"), _never_as_zero
    ),
}
"""Last word of a foreign key -> function that converts a foreign value to ours; a ValueError means that it cannot."""

LONGEST_TURN = "algorithm.max_sequence_length='${generator.sampling_params.max_generate_length}'"
"""Override for the constant by which Dr. GRPO's reduction divides: the limit of sampled tokens."""

REJECTING = {
    "token": "icepop algorithm.loss_anchor=old",
    "token_k1": "icepop algorithm.loss_anchor=old",
    "sequence": "mis",
    "seq_sum_k1": "mis",
    "geometric": "geometric",
    "seq_mean_k1": "geometric",
    "null": "none",
}
"""Values of verl's `rollout_rs`, which masks tokens outside the bounds; verl's `rollout_is` has the same values but
truncates weights."""

VALUES_OF_FOREIGN_KEY = {"algorithm.rollout_correction.rollout_rs": REJECTING}
"""Foreign keys whose values have another meaning than in `VALUES` -> their own table of values."""

VALUES = {
    "algorithm.advantage_method": {
        "reinforce++": "reinforce_pp",
        "rloo_vectorized": "rloo",
        "grpo_vectorized": "grpo",
        "normalize_then_sum": "gdpo",
        "sum_then_normalize": "grpo",
    },
    "algorithm.norm_by_std": {
        "group": "true",
        "none": "false",
        "batch": "true algorithm.advantage_method=reinforce_pp_baseline",
    },
    "algorithm.loss_fn": {
        "regular": "ppo",
        "vanilla": "ppo",
        "is": "importance_sampling",
        "token": "ppo",
        "sequence": "gspo",
        "dual_clip": "ppo algorithm.dual_clip=3.0",
        "reinforce": "importance_sampling",
        "rollout_is": "importance_sampling",
        "dppo_tv": "dppo",
        "dppo_kl": "dppo algorithm.dppo.divergence=kl",
    },
    "algorithm.dppo.divergence": {"binary_tv": "tv", "binary_kl": "kl"},
    "algorithm.off_policy_correction": {
        "token": "tis algorithm.loss_anchor=old",
        "sequence": "sequence_tis algorithm.loss_anchor=old",
        "product": "mis",
        "token_truncate": "tis algorithm.loss_anchor=old",
        "token_mask": "icepop algorithm.loss_anchor=old",
        "sequence_truncate": "sequence_tis algorithm.loss_anchor=old",
        "sequence_mask": "mis",
        "seq_sum_k1": "mis",
        "seq_mean_k1": "geometric",
        "null": "none",
    },
    "algorithm.router_replay": {"disabled": "false", "R3": "true"},
    "algorithm.loss_anchor": {"true": "rollout", "false": "old"},
    "algorithm.loss_reduction": {
        "token-mean": "token_mean",
        "bnpo": "token_mean",
        "dapo": "token_mean",
        "grpo": "sequence_mean",
        "seq-mean-token-mean": "sequence_mean",
        "seq-mean-token-sum": "seq_mean_token_sum",
        "seq-mean-token-sum-norm": f"seq_mean_token_sum_norm {LONGEST_TURN}",
        "dr_grpo": f"seq_mean_token_sum_norm {LONGEST_TURN}",
        "cispo": "token_mean algorithm.loss_fn=cispo",
        "sapo": "sequence_mean algorithm.loss_fn=sapo",
    },
    "algorithm.kl_estimator": {"kl": "k1", "mse": "k2", "low_var_kl": "k3", "k3+": "k3_plus"},
    "trainer.optimizer.schedule": {
        "constant_with_warmup": "constant",
        "linear_with_warmup": "linear",
        "cosine_with_warmup": "cosine",
    },
    "generator.backend": {"hf": "local", "transformers": "local", "engine": "sglang"},
    "resume": {"true": "latest", "false": "none", "null": "none"},
    "experiment": {"text2sql": "text_to_sql", "gsm8k_multi_turn": "gsm8k"},
    "data.max_train_rows": {"-1": "null"},
    "data.max_test_rows": {"-1": "null"},
    "trainer.checkpoint.keep_last": {"-1": "1000000", "null": "1000000"},
    "model.dtype": {"bf16": "bfloat16", "fp32": "float32"},
}
"""Our key -> foreign value -> our value, which a second setting can follow."""
