"""The managed service's names for mtrl's settings, and the values that it accepts.

The source is AWS's page of hyperparameters for multi-turn RL, as of summer 2026. The service's own list is in its model
hub; a real job takes the names from there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from mtrl.config import keys, messages
from mtrl.config.schema import Config
from mtrl.errors import UserError


@dataclass(frozen=True)
class Hyperparameter:
    """A hyperparameter of the service. `key` is mtrl's configuration key."""

    name: str
    key: str
    default: Any
    low: float | None = None
    high: float | None = None
    words: tuple[Any, ...] = ()
    """The allowed values; empty if any value in the range is allowed."""

    def check(self, value: Any) -> None:
        """Check that the service accepts this value.

        Raises:
            UserError: the service does not accept this value.
        """
        setting = f"{self.key}={keys.typed(value)}: the managed service's {self.name}"
        if self.words and value not in self.words:
            near = _nearest(value, self.words)
            raise UserError(f"{setting} is one of {', '.join(map(str, self.words))}; write {self.key}={near}")
        if self.low is not None and not self.low <= value <= (self.high or value):
            near = max(self.low, min(value, self.high or value))
            raise UserError(f"{setting} lies from {self.low} to {self.high}; write {self.key}={near}")


def _nearest(value: Any, words: tuple[Any, ...]) -> Any:
    if isinstance(value, str):
        return keys.nearest(value, words) or words[0]
    return min(words, key=lambda word: abs(word - value))


METHODS = {
    "grpo": "group_based",
    **{name: name for name in ("monte_carlo", "group_based", "group_based_per_turn", "rloo", "reinforce_pp")},
    **{name: name for name in ("reinforce_pp_baseline", "opo", "grpo_passk", "gpg")},
}
"""The service's name of each of mtrl's estimators that it offers."""
LOSSES = ("importance_sampling", "ppo", "cispo")

TABLE = (
    Hyperparameter("global_batch_size", "trainer.prompts_per_step", 128, words=(32, 64, 128)),
    Hyperparameter("group_size", "algorithm.group_size", 8, 2, 32),
    Hyperparameter("advantage_method", "algorithm.advantage_method", "group_based"),
    Hyperparameter("loss_fn", "algorithm.loss_fn", "ppo"),
    Hyperparameter("clip_low_threshold", "algorithm.clip_low_threshold", 0.8, 0, 1),
    Hyperparameter("clip_high_threshold", "algorithm.clip_high_threshold", 1.2, 1, 10),
    Hyperparameter("temperature", "generator.sampling_params.temperature", 1.0, 0, 2),
    Hyperparameter("sampling_top_p", "generator.sampling_params.top_p", 1.0, 0, 1),
    Hyperparameter("sampling_max_tokens", "generator.sampling_params.max_generate_length", 4096, 512, 8192),
    Hyperparameter("pass_k_values", "evaluation.pass_k_values", [1, 2, 4, 8, 16, 32]),
    Hyperparameter("success_threshold", "evaluation.success_threshold", 1.0),
    Hyperparameter("max_steps", "trainer.max_steps", 50, 1, 1000),
    Hyperparameter("val_every", "evaluation.every_steps", 10, 0, 100),
    Hyperparameter("lora_rank", "model.lora_rank", 32, 16, 64),
    Hyperparameter("lora_alpha", "model.lora_alpha", 64, 16, 128),
    Hyperparameter("learning_rate", "trainer.optimizer.lr", 4e-5, 1e-12, 1e-2),
    Hyperparameter("max_steps_off_policy", "async_config.max_steps_off_policy", 0, 0),
)
EVALUATION = {
    "eval_group_size": "evaluation.samples_per_row",
    "sampling_temperature": "generator.eval_sampling_params.temperature",
    "max_tokens": "generator.eval_sampling_params.max_generate_length",
    "pass_k_values": "evaluation.pass_k_values",
    "success_threshold": "evaluation.success_threshold",
}
"""mtrl's configuration key of each hyperparameter of an evaluation."""
OURS_ALONE = ("algorithm", "generator.sampling_params", "trainer.optimizer", "async_config")
"""Sections whose other settings affect training, although the service has no keys for them."""


def translate(cfg: DictConfig) -> dict[str, Any]:
    """Return the service's hyperparameters for a training job.

    Raises:
        UserError: an algorithm that the service does not offer, or a value out of its range.
    """
    found = {}
    for parameter in TABLE:
        value = OmegaConf.select(cfg, parameter.key)
        if parameter.key.startswith("model.lora_") and not cfg.model.lora_rank:
            continue  # the service trains only adapters, with its default rank if none is given
        found[parameter.name] = value = _spelt(parameter, value)
        parameter.check(value)
    return found


def translate_evaluation(cfg: DictConfig) -> dict[str, Any]:
    """Return the service's hyperparameters for an evaluation."""
    values = {name: OmegaConf.select(cfg, key) for name, key in EVALUATION.items()}
    return {name: _plain(value) for name, value in values.items() if value is not None}


def _spelt(parameter: Hyperparameter, value: Any) -> Any:
    if parameter.name == "advantage_method":
        if value not in METHODS:
            offered = ", ".join(METHODS)
            raise UserError(f"{parameter.key}={value} is not offered by the managed service; take one of {offered}")
        return METHODS[value]
    if parameter.name == "loss_fn":
        value = keys.all_keys()[parameter.key].aliases.get(value, value)
        if value not in LOSSES:
            raise messages.unknown_choice(parameter.key, value, LOSSES, " (what the managed service offers)")
    return _plain(value)


def _plain(value: Any) -> Any:
    return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value


def left_out(cfg: DictConfig) -> Iterator[str]:
    """Yield one line for each setting that affects training and has no equivalent in the service."""
    known = {parameter.key for parameter in TABLE}
    defaults: Any = OmegaConf.structured(Config)
    for section in OURS_ALONE:
        values = keys.flat(OmegaConf.to_container(OmegaConf.select(cfg, section), resolve=True))  # type: ignore[arg-type]
        for name, value in values.items():
            key = f"{section}.{name}"
            if key not in known and value != _plain(OmegaConf.select(defaults, key)) and not _is_of_another(cfg, key):
                yield f"{key}={keys.typed(value)} has no equal in the managed service, and is left out"
    yield (
        f"generator.max_turns={cfg.generator.max_turns}, environment.* and reward.* are the agent's there: its loop "
        "ends the episode, and it reports the reward"
    )


def _is_of_another(cfg: DictConfig, key: str) -> bool:
    """Whether the setting belongs to an algorithm that is not selected."""
    return key.startswith("algorithm.critic.") and cfg.algorithm.advantage_method not in ("gae", "turn_gae")
