"""Warnings about settings that are allowed but have another effect than they seem to, or none."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from functools import cache
from typing import Any

from omegaconf import DictConfig

from mtrl.command.algorithm_checks import credit_of
from mtrl.config import keys
from mtrl.config.algorithm_schema import PUBLISHED_BOUNDS, WITH_CRITIC
from mtrl.config.derived import (
    engine_installation,
    is_deterministic,
    local_replicas,
    may_be_sharded,
    overlaps,
    ranks,
    runs_agent,
    serves,
)
from mtrl.config.mixture import OWN, is_replaced
from mtrl.config.model_schema import TinyConfig
from mtrl.config.overrides import key_of
from mtrl.utils.gpus import visible_gpus

Condition = Callable[[DictConfig], bool]
Values = dict[str, Any]
"""Plain values of a configuration (`keys.plain`)."""


def _has_kl(c: DictConfig) -> bool:
    return bool(c.algorithm.kl_loss_coef or c.algorithm.kl_reward_coef)


def _has_critic(c: DictConfig) -> bool:
    return c.algorithm.advantage_method in WITH_CRITIC["advantage_method"]


AGENT_KEYS = (
    "max_concurrent",
    "max_calls",
    "max_calls_at_once",
    "max_requests_per_second",
    "leave_out",
    "host",
    "port",
)
"""Keys of `generator.agent` that concern every program."""
IDLE: list[tuple[tuple[str, ...], Condition, str]] = [
    (("algorithm.kl_estimator",), lambda c: not c.algorithm.kl_loss_coef, "algorithm.kl_loss_coef=0"),
    (
        ("algorithm.kl_reference", "algorithm.kl_target", "algorithm.kl_horizon"),
        lambda c: not _has_kl(c),
        "algorithm.kl_loss_coef=0 and algorithm.kl_reward_coef=0",
    ),
    (
        ("distillation.weight", "distillation.reward_weight", "distillation.top_k"),
        lambda c: c.distillation.teacher.path is None and c.distillation.teacher.url is None,
        "no teacher; name one by distillation.teacher.path or url",
    ),
    (
        ("distillation.teacher", "distillation.reward_weight", "distillation.top_k"),
        lambda c: c.distillation.weight == 0,
        "distillation.weight=0",
    ),
    (
        ("distillation.teacher.model", "distillation.teacher.endpoint"),
        lambda c: c.distillation.weight != 0 and c.distillation.teacher.url is None,
        "distillation.teacher.url=null",
    ),
    (
        ("environment.opponent_path",),
        lambda c: c.environment.opponent != "frozen",
        "another environment.opponent than frozen",
    ),
    (("algorithm.kl_horizon",), lambda c: _has_kl(c) and c.algorithm.kl_target is None, "algorithm.kl_target=null"),
    (("trainer.optimizer.min_lr_ratio",), lambda c: c.trainer.optimizer.schedule == "constant", "a constant schedule"),
    (
        ("algorithm.critic.optimizer.min_lr_ratio",),
        lambda c: _has_critic(c) and c.algorithm.critic.optimizer.schedule == "constant",
        "a constant schedule",
    ),
    (
        ("trainer.optimizer.warmup_steps",),
        lambda c: _has_critic(c) and c.trainer.optimizer.warmup_steps <= c.algorithm.critic.warmup_steps,
        "algorithm.critic.warmup_steps of as many steps or more, in which the policy is not trained",
    ),
    (
        ("trainer.profile_step",),
        lambda c: c.trainer.epochs is None and (c.trainer.profile_step or 0) > c.trainer.max_steps,
        "fewer steps (trainer.max_steps)",
    ),
    (
        ("trainer.recomputed_layers", "trainer.activation_offload"),
        lambda c: not c.trainer.gradient_checkpointing,
        "trainer.gradient_checkpointing=false, which recomputes no layer",
    ),
    (("model.path",), lambda c: c.model.name == "tiny", "model=tiny, which is built here; add model=hf"),
    (
        tuple(f"model.tiny.{each.name}" for each in fields(TinyConfig)),
        lambda c: c.model.name != "tiny",
        "model=hf, whose sizes are its own",
    ),
    (("model.lora_alpha", "model.lora_target_modules"), lambda c: c.model.lora_rank == 0, "model.lora_rank=0"),
    (
        ("data.synthetic_train_rows", "data.synthetic_test_rows"),
        lambda c: c.data.path is not None,
        "data.path, which replaces the synthetic rows",
    ),
    (
        ("async_config.on_stale", "async_config.in_flight", "async_config.max_concurrent_groups"),
        lambda c: not overlaps(c),
        "async_config.max_steps_off_policy=0",
    ),
    (
        ("trainer.fsdp",),
        lambda c: not may_be_sharded(c),
        "one process; start several with torchrun, or set trainer.fsdp.param_dtype or trainer.fsdp.cpu_offload",
    ),
    (
        ("generator.gpu_memory_utilization", "generator.vllm", "generator.sglang"),
        lambda c: c.generator.backend == "local",
        "generator.backend=local",
    ),
    (
        ("generator.local.cuda_graphs",),
        lambda c: not serves(c) and not (c.generator.local.fused and c.model.device != "cpu" and visible_gpus()),
        "generator.local.fused=false, or without a GPU",
    ),
    (("generator.local", "generator.sglang"), lambda c: c.generator.backend == "vllm", "generator.backend=vllm"),
    (("generator.local", "generator.vllm"), lambda c: c.generator.backend == "sglang", "generator.backend=sglang"),
    (
        tuple(f"generator.agent.{key}" for key in AGENT_KEYS),
        lambda c: not runs_agent(c),
        "no agent program; name one by generator.agent.target, command or url",
    ),
    (
        ("generator.agent.env", "generator.agent.pass_env"),
        lambda c: c.generator.agent.command is None,
        "generator.agent.command=null",
    ),
    (("generator.agent.api_key_env",), lambda c: c.generator.agent.url is None, "generator.agent.url=null"),
    (
        ("evaluation.samples_per_row", "evaluation.pass_k_values"),
        lambda c: not c.evaluation.sampled_rows,
        "evaluation.sampled_rows=0, which samples no row",
    ),
    (("reward.scheme",), runs_agent, "a program, which reports the reward itself"),
    (
        ("environment.step_timeout", "environment.max_workers"),
        lambda c: runs_agent(c) and c.model.name != "tiny",
        "a program; environment.episode_timeout and generator.agent.max_concurrent are its limits",
    ),
]
"""Keys, the condition under which changing them has no effect, and the reason for the warning."""


def _updates(c: DictConfig) -> int:
    return int(c.trainer.mini_batches * c.trainer.update_epochs)


WIDE, NARROW = 0.02, 0.005
"""Distances from 1 of a bound on the probability ratio of whole trajectories. A distance above `WIDE` bounds nothing.
The papers of gspo and geometric use distances below `NARROW`, which most trajectories exceed if another engine or an
older policy sampled them."""


def _width(low: float, high: float) -> float:
    return round(max(1 - low, high - 1), 9)


def _clip_width(c: DictConfig) -> float:
    return _width(c.algorithm.clip_low_threshold, c.algorithm.clip_high_threshold)


CONDITIONAL: list[tuple[Condition, str]] = [
    (
        lambda c: c.placement.ranks is not None and ranks() != c.placement.machines * c.placement.ranks,
        "placement.ranks={c.placement.ranks} (x {c.placement.machines} machines) is not the number of ranks that run; "
        "start it with torchrun --nnodes {c.placement.machines} --nproc-per-node {c.placement.ranks} -m mtrl.main",
    ),
    (
        lambda c: (
            c.model.name == "hf"
            and not serves(c)
            and c.model.device != "cpu"
            and visible_gpus() > 1
            and local_replicas(c) == 1
        ),
        "generator.backend=local samples on one of the GPUs, and servers use all; install an engine by "
        f"{engine_installation('vllm')} and take generator=auto",
    ),
    (
        lambda c: c.model.name == "hf" and c.trainer.optimizer.lr > 1e-4 and c.model.lora_rank == 0,
        "trainer.optimizer.lr={c.trainer.optimizer.lr} is high for a pretrained model, which usually takes 1e-6",
    ),
    (
        lambda c: c.model.name == "hf" and c.model.lora_rank > 0 and c.trainer.optimizer.lr < 3e-6,
        "trainer.optimizer.lr={c.trainer.optimizer.lr} is low for adapters (model.lora_rank={c.model.lora_rank}), "
        "which take about ten times the rate of full training (LoRA Without Regret, 2025), usually 1e-5",
    ),
    (
        lambda c: c.model.name == "hf" and c.model.lora_rank > 0 and c.trainer.optimizer.lr > 1e-3,
        "trainer.optimizer.lr={c.trainer.optimizer.lr} is high for adapters (model.lora_rank={c.model.lora_rank}) of a "
        "pretrained model, which usually take 1e-5",
    ),
    (
        lambda c: c.trainer.epochs is None and 0 < c.trainer.max_steps < c.trainer.optimizer.warmup_steps,
        "trainer.optimizer.warmup_steps={c.trainer.optimizer.warmup_steps} is more than trainer.max_steps="
        "{c.trainer.max_steps}, so the learning rate stays below trainer.optimizer.lr={c.trainer.optimizer.lr}; lower "
        "the first or raise the second",
    ),
    (
        lambda c: c.model.lora_rank > 0 and not 1 / 32 <= c.model.lora_alpha / c.model.lora_rank <= 32,
        "model.lora_alpha={c.model.lora_alpha} and model.lora_rank={c.model.lora_rank} scale the adapters by "
        "lora_alpha / lora_rank, and a factor of 1 or 2 is usual; set model.lora_alpha to 1 or 2 times the rank",
    ),
    (
        lambda c: c.model.name == "tiny" and not c.model.warm_start.enabled,
        "model.warm_start.enabled=false has no effect with model.name=tiny, whose random weights learn nothing without "
        "imitation; for a short one write model.warm_start.max_steps=1 model.warm_start.success_band=[0.0,1.0]",
    ),
    (
        lambda c: c.data.max_test_rows is not None and c.evaluation.rows > c.data.max_test_rows,
        "evaluation.rows={c.evaluation.rows} is limited to data.max_test_rows={c.data.max_test_rows}; raise "
        "that as well",
    ),
    (
        lambda c: c.algorithm.kl_loss_coef > 0 and c.algorithm.kl_estimator == "k1",
        "algorithm.kl_estimator=k1 in the loss has a mean gradient of zero; k2 and k1_unbiased have a gradient towards "
        "the reference",
    ),
    (
        lambda c: c.algorithm.loss_fn == "gspo" and _clip_width(c) > WIDE,
        "algorithm.loss_fn=gspo clips nothing at algorithm.clip_low_threshold={c.algorithm.clip_low_threshold} and "
        "algorithm.clip_high_threshold={c.algorithm.clip_high_threshold}: its ratio is a mean over the tokens of a "
        "trajectory, and its paper takes 0.9997 and 1.0004",
    ),
    (
        lambda c: (
            c.algorithm.loss_fn == "gspo"
            and c.algorithm.loss_anchor == "rollout"
            and _clip_width(c) < NARROW
            and (serves(c) or overlaps(c))
        ),
        "algorithm.loss_fn=gspo with algorithm.loss_anchor=rollout bounds the ratio to the engine's log-probs, and "
        "most trajectories leave algorithm.clip_low_threshold={c.algorithm.clip_low_threshold} and "
        "algorithm.clip_high_threshold={c.algorithm.clip_high_threshold} by the drift of an engine or by stale tokens "
        "(generator.backend={c.generator.backend}, async_config.max_steps_off_policy="
        "{c.async_config.max_steps_off_policy}), so 77 to 96 % of the gradient are lost at a policy shift of 0.02; set "
        "algorithm.loss_anchor=old, or algorithm.clip_low_threshold=0.98 and algorithm.clip_high_threshold=1.02",
    ),
    (
        lambda c: (
            c.algorithm.loss_fn in ("importance_sampling", "reinforce_is")
            and math.isinf(c.algorithm.is_cap)
            and _updates(c) > 1
        ),
        "algorithm.is_cap=inf leaves the weights of later updates of a step without a bound (trainer.mini_batches="
        "{c.trainer.mini_batches}, trainer.update_epochs={c.trainer.update_epochs}); algorithm.is_cap=2 or "
        "algorithm.loss_fn=ppo has one",
    ),
    (
        lambda c: is_deterministic(c) and (c.generator.agent.command is not None or c.generator.agent.url is not None),
        "generator.local.deterministic lets every turn wait until each running program has sent a request or ended, so "
        "the slowest program determines the speed; write generator.local.deterministic=false where a resumed run need "
        "not be the same",
    ),
    (
        lambda c: (
            c.async_config.max_steps_off_policy > 2
            and c.algorithm.loss_fn in ("ppo", "cispo", "gspo")
            and c.algorithm.loss_anchor == "rollout"
        ),
        "async_config.max_steps_off_policy={c.async_config.max_steps_off_policy} cost "
        "algorithm.loss_fn={c.algorithm.loss_fn} its gain in experiments, because its bounds then refer to "
        "old tokens (AReaL, 2505.24298); algorithm=decoupled_ppo did not",
    ),
]
"""Conditions and their warnings."""


def hints(cfg: DictConfig, values: Values) -> list[str]:
    """Return the warnings for this configuration, each one sentence.

    Args:
        values: the plain values of `cfg`.
    """
    idle = [
        f"{keys.setting_at(values, path)} has no effect with {reason}"
        for paths, applies, reason in IDLE
        if applies(cfg)
        for path in _settings_in(paths)
        if _is_changed(values, path) and not _is_of_all_engines(values, path)
    ]
    conditional = [text.format(c=cfg) for applies, text in CONDITIONAL if applies(cfg)]
    return list(dict.fromkeys([*_unread(cfg, values), *idle, *conditional, *_rejecting(cfg), *_objective(cfg)]))


def _is_of_all_engines(values: Values, path: str) -> bool:
    """Return whether an unused engine has the same setting as the engine in use, because a placement sets both."""
    used = re.sub(r"^generator\.(vllm|sglang)\.", f"generator.{values['generator']['backend']}.", path)
    is_other = used != path and used in keys.all_keys()
    return is_other and keys.value_at(values, used) == keys.value_at(values, path)


def training_hints(cfg: DictConfig) -> list[str]:
    """Return warnings about settings that only another program reads."""
    elsewhere = [key for key in keys.all_keys().values() if key.program]
    values = {section: keys.plain(cfg[section]) for section in {key.path.partition(".")[0] for key in elsewhere}}
    return [
        f"{keys.setting_at(values, path)} has no effect on training; {key.program} reads it"
        for key in elsewhere
        for path in _settings_in((key.path,))
        if _is_changed(values, path)
    ]


READ_BY_THE_RUN = (
    *("environment.step_timeout", "environment.episode_timeout", "generator.max_context_length"),
    "generator.sampling_params.max_generate_length",
)
"""Keys of `OWN` that have an effect although every source sets its own: on the warm start, the scorer, the memory of
the engine and the folding of contexts."""


def mixture_hints(cfg: DictConfig, overrides: Sequence[str]) -> list[str]:
    """Return warnings about overrides of keys, and a choice of a task, that every source of a mixture replaces.

    Only overrides are examined, because an experiment may set such a key for sources that are added later.
    """
    environments = keys.plain(cfg.environments)
    names = " and ".join(environments)
    replaced = [
        f"{override.lstrip('+')} has no effect with environments, since {names} replace it; set "
        f"environments.NAME.{path}"
        for override in overrides
        if (path := key_of(override)) not in READ_BY_THE_RUN
        and any(f"{path}.".startswith(f"{section}.{own}.") for section, each in OWN.items() for own in each)
        and is_replaced(environments, path)
    ]
    tasks = [  # a group's other keys, such as limits on time, may still have an effect
        f"{override} chooses the task of no episode, since {names} name their own; set "
        "environments.NAME.environment.name"
        for override in overrides
        if override.startswith("environment=") and is_replaced(environments, "environment.name")
    ]
    return replaced + tasks


def _unread(cfg: DictConfig, values: Values) -> Iterator[str]:
    """Yield warnings about settings of a method, loss, … that is not selected."""
    for key in _read_with_others():
        chosen = {chooser: _chosen(cfg, values, chooser) for chooser in key.read_with}
        if None in chosen.values() or any(chosen[chooser] in words for chooser, words in key.read_with.items()):
            continue
        readers = " or ".join(f"{chooser}={'|'.join(words)}" for chooser, words in key.read_with.items())
        other = keys.setting_at(values, next(iter(key.read_with)))
        for path in _settings_in((key.path,)):
            if _is_changed(values, path):
                yield f"{keys.setting_at(values, path)} has no effect with {other}; it is read with {readers}"


@cache
def _read_with_others() -> list[keys.Key]:
    return [key for key in keys.all_keys().values() if key.read_with]


def _chosen(cfg: DictConfig, values: Values, chooser: str) -> str | None:
    """Return the selected word, with aliases resolved; None for a user's function, which may read any key."""
    word = str(credit_of(cfg) if chooser == "algorithm.credit" else keys.value_at(values, chooser))
    key = keys.all_keys()[chooser]
    if not key.functions:
        return word
    return key.aliases.get(word, word) if word in key.functions else None


@cache
def _settings_in(paths: tuple[str, ...]) -> list[str]:
    return [known for path in paths for known in keys.settings() if known == path or known.startswith(f"{path}.")]


def _is_changed(values: Values, path: str) -> bool:
    default = keys.all_keys()[path].default
    return keys.value_at(values, path) != (list(default) if isinstance(default, tuple) else default)


def _rejecting(cfg: DictConfig) -> Iterator[str]:
    """Yield a warning about a correction that masks nearly all tokens that an older policy sampled."""
    algorithm = cfg.algorithm
    if algorithm.off_policy_correction != "geometric" or not overlaps(cfg):
        return
    own, published = (algorithm.correction_low, algorithm.correction_high), PUBLISHED_BOUNDS["geometric"]
    low, high = (theirs if mine is None else mine for mine, theirs in zip(own, published, strict=True))
    if _width(low, high) < NARROW:
        yield (
            f"algorithm.off_policy_correction=geometric trains on trajectories whose mean ratio is from {low} to "
            f"{high}, and with async_config.max_steps_off_policy={cfg.async_config.max_steps_off_policy} hardly any "
            "has one: at a policy shift of 0.02 it trained on 0 to 29 % of the tokens; set "
            "algorithm.correction_low=0.95 and algorithm.correction_high=1.05, or take "
            "algorithm.off_policy_correction=mis, or sequence_tis with algorithm.loss_anchor=old"
        )


def _objective(cfg: DictConfig) -> list[str]:
    from mtrl.record.run_dir import SUMMARY_KEYS

    if cfg.objective in SUMMARY_KEYS:
        return []
    near = keys.nearest(cfg.objective, SUMMARY_KEYS, cutoff=0.5)
    return [
        f"objective={cfg.objective} is not one of the keys that every summary.json holds"
        + (f"; did you mean {near}?" if near else "")
    ]
