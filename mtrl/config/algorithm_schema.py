"""Settings of the algorithm: credit assignment, loss, KL and corrections."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mtrl.config.field import function, number, one_of, setting
from mtrl.config.trainer_schema import OptimizerConfig

PUBLISHED_BOUNDS = {
    "tis": (0.0, 2.0),
    "sequence_tis": (0.0, 2.0),
    "icepop": (0.5, 5.0),
    "mis": (0.5, 2.0),
    "geometric": (0.999, 1.001),
}
"""Bounds of each off-policy correction where `correction_low` and `correction_high` are null, from its paper."""
WITH_CRITIC = {"advantage_method": ("gae", "turn_gae")}
CLIPPED = {"loss_fn": ("ppo", "cispo", "gspo", "decoupled_ppo")}
"""Losses that clip the probability ratio at fixed bounds."""


@dataclass
class PassKConfig:
    """The reward of the best of k trajectories."""

    k: int = number(4, at_least=1, read_with={"estimator": ("pkpo_sloo1", "pkpo_sloo", "chen")})
    estimator: str = one_of("pkpo_sloo1", "pkpo_sloo", "chen", "top2")


@dataclass
class CriticConfig:
    """The value model, which is a copy of the policy's body with its own head."""

    path: str | None = None
    """Model folder that the critic starts from; null: the policy's weights at the start of the run."""
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-5))
    value_clip: float | None = number(0.2, above=0)
    """Maximum distance of a value from its value at rollout time before its loss is clipped; null: no clip."""
    warmup_steps: int = number(0, at_least=0)
    """Number of steps at the start of the run in which only the critic is trained."""


@dataclass
class SapoConfig:
    """Temperatures of the soft gate."""

    tau_positive: float = number(1.0, above=0)
    tau_negative: float = number(1.05, above=0)


@dataclass
class DppoConfig:
    """Limits on the change of a token's probability, beyond which the token is masked."""

    divergence: str = one_of("tv", "kl")
    """Divergence of the binary distribution "this token or another". tv: total variation | kl: KL divergence"""
    delta_low: float = number(0.2, above=0, may_be_infinite=True)
    delta_high: float = number(0.2, above=0, may_be_infinite=True)


@dataclass
class AlgorithmConfig:
    """Credit assignment and loss."""

    advantage_method: str = function(
        *("turn_rloo", "grpo", "dr_grpo", "rloo", "opo", "gpg", "maxrl", "gdpo", "grpo_passk", "monte_carlo"),
        *("reinforce_pp", "reinforce_pp_baseline", "group_based_per_turn", "mt_grpo", "gigpo", "turn_gae", "gae"),
        aliases={
            "group_based": "grpo",
            "reinforce_plus_plus": "reinforce_pp",
            "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
        },
    )
    """Estimator of the advantages."""
    credit: str | None = one_of(None, "trajectory", "turn", "turn+outcome")
    """Rewards that a turn gets credit for. trajectory: the sum of all rewards | turn: the rewards from this turn on,
    compared with the peers that reached it | turn+outcome: the last turn's reward, plus the turn rewards from this turn
    on | null: as the method is published"""
    group_size: int = number(8, at_least=1)
    norm_by_std: bool = setting(True, read_with={"advantage_method": ("grpo", "mt_grpo", "gigpo")})
    """Divide by the group's standard deviation."""
    gamma: float = number(
        1.0,
        at_least=0,
        at_most=1,
        read_with={"advantage_method": ("gigpo", "turn_gae", "gae"), "credit": ("turn", "turn+outcome")},
    )
    """Discount per turn (gae: per token)."""
    gae_lambda: float = number(1.0, at_least=0, at_most=1, read_with=WITH_CRITIC)
    turn_advantage_coef: float = setting(1.0, read_with={"advantage_method": ("gigpo",), "credit": ("turn+outcome",)})
    """Weight of the advantage that comes from the turn rewards."""
    whiten_advantages: bool = setting(True, read_with=WITH_CRITIC)
    """Normalise advantages to mean 0 and standard deviation 1 over the sampled tokens of a step."""
    passk: PassKConfig = setting(factory=PassKConfig, read_with={"advantage_method": ("grpo_passk",)})
    critic: CriticConfig = setting(factory=CriticConfig, read_with=WITH_CRITIC)
    loss_fn: str = function(
        *("ppo", "cispo", "importance_sampling", "gspo", "sapo", "dppo", "decoupled_ppo"),
        aliases={"reinforce_is": "importance_sampling", "regular": "ppo"},
    )
    """Loss of the policy per token."""
    clip_low_threshold: float = number(
        0.8,
        at_least=0,
        at_most=1,
        why="it is a bound on the probability ratio, 0.8 for an epsilon of 0.2",
        read_with=CLIPPED,
    )
    """Lower bound on the probability ratio."""
    clip_high_threshold: float = number(
        1.2,
        at_least=1,
        why="it is a bound on the probability ratio, 1.2 for an epsilon of 0.2",
        may_be_infinite=True,
        read_with=CLIPPED,
    )
    """Upper bound on the probability ratio; inf: none."""
    dual_clip: float | None = number(None, at_least=1, read_with={"loss_fn": ("ppo", "gspo", "decoupled_ppo")})
    is_cap: float = number(
        2.0,
        above=0,
        may_be_infinite=True,
        read_with={"loss_fn": ("importance_sampling", "dppo", "decoupled_ppo")},
    )
    """importance_sampling, dppo: cap on the ratio; decoupled_ppo: cap on the behaviour weight; inf: none."""
    sapo: SapoConfig = setting(factory=SapoConfig, read_with={"loss_fn": ("sapo",)})
    dppo: DppoConfig = setting(factory=DppoConfig, read_with={"loss_fn": ("dppo",)})
    loss_reduction: str = function(
        *("token_mean", "sequence_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm", "turn_mean", "prompt_mean"),
        aliases={"seq_mean_token_mean": "sequence_mean"},
    )
    """Reduction of the losses of all tokens to one number."""
    max_sequence_length: int | None = number(
        None, at_least=1, read_with={"loss_reduction": ("seq_mean_token_sum_norm",)}
    )
    """The constant divisor of the sum over tokens."""
    kl_loss_coef: float = number(0.0, at_least=0)
    """Weight of the KL to the reference as a term of the loss."""
    kl_reward_coef: float = number(0.0, at_least=0)
    """Weight of the KL to the reference as a penalty on the reward of each turn."""
    kl_estimator: str = function("k3", "k1", "k2", "k3_plus", "k1_unbiased", "k3_unbiased")
    """Estimator of the KL in the loss; in the reward it is always k1."""
    kl_target: float | None = number(None, above=0)
    """Target of the KL, in nats per token, that an adaptive coefficient holds; null: the coefficient is fixed."""
    kl_horizon: int = number(10_000, at_least=1)
    """kl_target: number of trajectories over which an error of a fifth of the target or more changes the coefficient by
    about a fifth."""
    kl_reference: str | None = None
    """Model folder of the reference; null: the policy at the start of the run."""
    entropy_coef: float = 0.0
    expert_balance_coef: float = number(0.0, at_least=0)
    """Weight of the load-balancing loss of a mixture of experts (Switch Transformer, 2101.03961)."""
    router_replay: bool = False
    """In the update, send each token of a mixture of experts to the experts that the engine chose for it (R3,
    2510.11370)."""
    loss_anchor: str = one_of("rollout", "old")
    """Log-probs of the old policy in the loss. rollout: those of the engine | old: those of the trainer, recomputed
    before the update"""
    off_policy_correction: str = function("none", *PUBLISHED_BOUNDS)
    """Correction for the difference between the log-probs of engine and trainer."""
    correction_low: float | None = number(None, at_least=0, read_with={"off_policy_correction": (*PUBLISHED_BOUNDS,)})
    """Lower bound of the correction; null: the value of its paper."""
    correction_high: float | None = number(
        None, above=0, may_be_infinite=True, read_with={"off_policy_correction": (*PUBLISHED_BOUNDS,)}
    )
    """Upper bound of the correction; null: the value of its paper; inf: none."""
    drop_zero_advantage: bool = True
    """Leave trajectories without advantage out of the update; denominators still count them."""
    dynamic_sampling_rounds: int = number(0, at_least=0)
    """Maximum number of times per step that groups without an advantage are replaced by groups of new prompts; 0: such
    groups are not replaced."""
    overlong_filtering: bool = False
    """Do not train on trajectories that a length limit cut; their rewards still count in the group's baseline."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Settings of your own estimators and losses, which read them as `config.extra`."""
