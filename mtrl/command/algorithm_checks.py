"""Checks of `algorithm.*`: combinations that would optimise another objective than their names say.

Each part takes the whole configuration and raises a `UserError` with the key, the value and the fix.
"""

from __future__ import annotations

import math

from omegaconf import DictConfig

from mtrl.algorithms.registry import ESTIMATORS, RegisteredFunction
from mtrl.config.algorithm_schema import PUBLISHED_BOUNDS
from mtrl.config.derived import distils, serves
from mtrl.errors import UserError

PER_TURN = ("turn",)
"""Values of `algorithm.credit` that compare a turn with the peers that reached it; a turn without a peer gets 0.
`turn+outcome` compares with the whole group, and equals `trajectory` where only the last turn has a reward."""
NEEDS_OLD = ("tis", "sequence_tis", "icepop")
"""Corrections that weight the loss. With loss_anchor=rollout, the loss's own ratio to the engine's log-probs is already
that weight. Corrections that only mask (mis, geometric) work with either anchor."""


def method_of(cfg: DictConfig) -> RegisteredFunction:
    """Return the registry entry of the advantage estimator."""
    return ESTIMATORS.find(cfg.algorithm.advantage_method)


def credit_of(cfg: DictConfig) -> str | None:
    """Return the credit assignment: `algorithm.credit`, else the default of the method; None if the method has no
    choice."""
    return cfg.algorithm.credit or next(iter(method_of(cfg).credits), None)


def check_algorithm(cfg: DictConfig) -> None:
    """Run all checks of `algorithm.*`, in the order of the schema. Those of rewards and group sizes do not apply to a
    mixture, whose sources may replace both, but to each source.

    Raises:
        UserError: a combination of settings does not work.
    """
    of_one_task = (_group, _turn_rewards, _passk, _gdpo)
    checks = (_group, _credit, _turn_rewards, _passk, _gdpo, _critic, _anchor, _reduction, _kl)
    for part in (*checks, _bounds, _signal):
        if not (cfg.environments and part in of_one_task):
            part(cfg)


def _method(cfg: DictConfig) -> str:
    return f"algorithm.advantage_method={cfg.algorithm.advantage_method}"


def _group(cfg: DictConfig) -> None:
    if distils(cfg) and not cfg.distillation.reward_weight:
        return
    if cfg.algorithm.group_size < 2 and method_of(cfg).needs_group:
        raise UserError(f"algorithm.group_size=1 gives {_method(cfg)} nothing to compare; set it to 2 or more")


def _credit(cfg: DictConfig) -> None:
    credit, known = cfg.algorithm.credit, method_of(cfg).credits
    if credit is None or credit in known:
        return
    if known:
        raise UserError(
            f"algorithm.credit={credit} is not what {_method(cfg)} has; choose one of {', '.join(known)}, or null"
        )
    raise UserError(
        f"algorithm.credit={credit} does not fit {_method(cfg)}, which fixes the credit of a turn itself; "
        "set algorithm.credit=null"
    )


def _turn_rewards(cfg: DictConfig) -> None:
    # Only credit=turn is affected: a turn that no peer reached loses the reward of the last turn. Methods that compare
    # no turns (reinforce_pp, monte_carlo), and turn+outcome, which then equals trajectory credit, lose nothing.
    method = method_of(cfg)
    if cfg.reward.level != "trajectory" or credit_of(cfg) not in PER_TURN or not method.needs_group:
        return
    setting = f"algorithm.credit={cfg.algorithm.credit}" if cfg.algorithm.credit else _method(cfg)
    instead = "algorithm.credit=trajectory"
    if "trajectory" not in method.credits:
        instead = "a method of whole trajectories, such as algorithm.advantage_method=grpo"
    raise UserError(
        f"reward.level=trajectory puts the whole reward on the last turn, and {setting} compares single turns; "
        f"set reward.level=turn, or {instead}"
    )


def _passk(cfg: DictConfig) -> None:
    passk, size = cfg.algorithm.passk, cfg.algorithm.group_size
    if method_of(cfg).name != "grpo_passk" or passk.estimator == "top2":  # top2 uses the best of the whole group
        return
    if passk.k > size:
        raise UserError(
            f"algorithm.passk.k={passk.k} is more than algorithm.group_size={size}, which has no best of {passk.k}; "
            f"set algorithm.passk.k to {size} or less, or raise algorithm.group_size"
        )
    why = {"pkpo_sloo": "compares with the best of k others", "chen": "gives no advantage where k is the whole group"}
    if passk.k == size and passk.estimator in why:
        raise UserError(
            f"algorithm.passk.k={passk.k} must be below algorithm.group_size={size} with "
            f"algorithm.passk.estimator={passk.estimator}, which {why[passk.estimator]}; "
            "lower algorithm.passk.k, or take algorithm.passk.estimator=pkpo_sloo1"
        )
    if passk.estimator == "chen" and cfg.algorithm.kl_reward_coef:
        raise UserError(
            f"algorithm.kl_reward_coef={cfg.algorithm.kl_reward_coef} makes rewards other than 0 and 1, which "
            "algorithm.passk.estimator=chen cannot use; "
            "set algorithm.kl_loss_coef, or take algorithm.passk.estimator=pkpo_sloo1"
        )


def _gdpo(cfg: DictConfig) -> None:
    if method_of(cfg).name != "gdpo":
        return
    from mtrl.rewards.compose import RewardComposer

    counted = [name for name, weight in RewardComposer(cfg.reward).weights.items() if weight]
    if len(counted) < 2:
        raise UserError(
            "algorithm.advantage_method=gdpo normalises each component of the reward by itself, and reward.components "
            f"has {'only ' + counted[0] if counted else 'none'} with a weight; "
            "add another one, or take algorithm.advantage_method=grpo"
        )
    if cfg.algorithm.kl_reward_coef:
        raise UserError(
            f"algorithm.kl_reward_coef={cfg.algorithm.kl_reward_coef} lowers the reward, and "
            "algorithm.advantage_method=gdpo reads its components instead; set algorithm.kl_loss_coef"
        )


def _critic(cfg: DictConfig) -> None:
    critic, steps = cfg.algorithm.critic, cfg.trainer.max_steps
    if cfg.trainer.epochs is None and method_of(cfg).needs_critic and critic.warmup_steps >= max(steps, 1):
        raise UserError(
            f"algorithm.critic.warmup_steps={critic.warmup_steps} leaves no step for the policy of "
            f"trainer.max_steps={steps}; lower the first or raise the second"
        )


def _anchor(cfg: DictConfig) -> None:
    algorithm = cfg.algorithm
    loss, correction, anchor = algorithm.loss_fn, algorithm.off_policy_correction, algorithm.loss_anchor
    if loss == "decoupled_ppo" and correction != "none":
        raise UserError(
            f"algorithm.off_policy_correction={correction} weights the loss for the mismatch, as "
            "algorithm.loss_fn=decoupled_ppo does already; set algorithm.off_policy_correction=none, or "
            "algorithm.loss_fn=ppo"
        )
    if anchor == "old":
        return
    if loss == "decoupled_ppo":
        raise UserError(
            f"algorithm.loss_anchor={anchor} leaves algorithm.loss_fn=decoupled_ppo nothing to decouple: it needs the "
            "old policy apart from the one that sampled; set algorithm.loss_anchor=old"
        )
    if correction in NEEDS_OLD:
        raise UserError(
            f"algorithm.off_policy_correction={correction} with algorithm.loss_anchor={anchor} counts the mismatch "
            "twice, as the loss's own ratio is to the engine's log-probs already; set algorithm.loss_anchor=old"
        )


def _reduction(cfg: DictConfig) -> None:
    if cfg.algorithm.loss_reduction == "seq_mean_token_sum_norm" and cfg.algorithm.max_sequence_length is None:
        raise UserError(
            "algorithm.loss_reduction=seq_mean_token_sum_norm divides by a constant; "
            "set algorithm.max_sequence_length to a number of tokens"
        )


def _kl(cfg: DictConfig) -> None:
    loss, reward = cfg.algorithm.kl_loss_coef, cfg.algorithm.kl_reward_coef
    if loss and reward:
        raise UserError(
            f"algorithm.kl_loss_coef={loss} and algorithm.kl_reward_coef={reward} penalise the KL to the reference "
            "twice; set one of them to 0"
        )


def check_router_replay(cfg: DictConfig) -> None:
    """Check the settings of router replay, which only training does.

    Raises:
        UserError: the engine returns no experts, or the layers are compiled.
    """
    if not cfg.algorithm.router_replay:
        return
    if serves(cfg):
        raise UserError(
            "algorithm.router_replay=true needs an engine that returns the experts which it chose, and "
            f"generator.backend={cfg.generator.backend} does not return them to mtrl; set generator.backend=local, or "
            "algorithm.router_replay=false"
        )
    if cfg.trainer.compile:
        raise UserError(
            "algorithm.router_replay=true does not work with trainer.compile=true, whose layers are compiled with "
            "their own choice of experts; set one of them to false"
        )


def _bounds(cfg: DictConfig) -> None:
    algorithm = cfg.algorithm
    published = PUBLISHED_BOUNDS.get(algorithm.off_policy_correction, (0.0, math.inf))
    own = algorithm.correction_low, algorithm.correction_high
    low, high = (theirs if mine is None else mine for mine, theirs in zip(own, published, strict=True))
    if low > high:
        of = "" if None not in own else f" as algorithm.off_policy_correction={algorithm.off_policy_correction} has it"
        raise UserError(
            f"algorithm.correction_low={low} is above algorithm.correction_high={high}{of}, so no token would count; "
            "lower the first or raise the second"
        )


def _signal(cfg: DictConfig) -> None:
    # A user's function that is not registered may compare groups, so it is not checked.
    method, rounds = method_of(cfg), cfg.algorithm.dynamic_sampling_rounds
    if rounds and method.name in ESTIMATORS and not method.needs_group:
        raise UserError(
            f"algorithm.dynamic_sampling_rounds={rounds} replaces groups without an advantage, and {_method(cfg)} "
            "compares no groups; set it to 0"
        )
