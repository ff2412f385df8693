"""Words that keys take: those that the schema declares, and the names in registries of functions."""

from __future__ import annotations

from collections.abc import Iterable

from mtrl.config.keys import all_keys

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

REGISTERED: dict[str, tuple[str, ...]] = {
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


def list_registered(key: str, names: Iterable[str]) -> None:
    """Add the names of functions that a user's module registers, so that messages and completion list them too."""
    if key in REGISTERED:
        REGISTERED[key] = tuple(dict.fromkeys((*REGISTERED[key], *names)))


ALIASES = {"reinforce_is": "importance_sampling", "regular": "ppo"}
"""Alias -> name in `WITH_TORCH`."""

CHOICES = {path: key.choices for path, key in all_keys().items() if key.choices}
"""Key -> the words that it takes, which the schema declares; null is allowed where the type allows it."""

BOUNDS = {
    "tis": (0.0, 2.0),
    "sequence_tis": (0.0, 2.0),
    "icepop": (0.5, 5.0),
    "mis": (0.5, 2.0),
    "geometric": (0.999, 1.001),
}
"""Published bounds of each off-policy correction, where `correction_low` and `correction_high` are null."""
