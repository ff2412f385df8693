"""Checks of `distillation.*`: a teacher that can be reached, and settings that have an effect with it."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig, OmegaConf

from mtrl.command.algorithm_checks import method_of
from mtrl.config.derived import distils
from mtrl.engines.endpoints.budget import check_spending
from mtrl.errors import UserError
from mtrl.utils.http_address import http_address

TEACHER = "distillation.teacher"


def check_distillation(cfg: DictConfig) -> None:
    """Run all checks of `distillation.*`.

    Raises:
        UserError: a combination of settings does not work.
    """
    teacher = cfg.distillation.teacher
    endpoint: Any = OmegaConf.to_object(teacher.endpoint)
    check_spending(f"{TEACHER}.endpoint", endpoint.price, endpoint.budget)
    if teacher.path is not None and teacher.url is not None:
        raise UserError(
            f"{TEACHER}.path={teacher.path} and {TEACHER}.url={teacher.url} both name a teacher; set one of them to "
            "null"
        )
    if not distils(cfg):
        return
    if teacher.url is not None:
        _server(cfg)
    _without_rewards(cfg)
    if rounds := cfg.algorithm.dynamic_sampling_rounds:
        raise UserError(
            f"algorithm.dynamic_sampling_rounds={rounds} replaces groups without an advantage, and with "
            f"distillation.weight={cfg.distillation.weight} every group has one; set algorithm.dynamic_sampling_rounds="
            "0"
        )


def _server(cfg: DictConfig) -> None:
    teacher, temperature = cfg.distillation.teacher, cfg.generator.sampling_params.temperature
    if http_address(teacher.url) is None:
        raise UserError(f"{TEACHER}.url={teacher.url} is no address; write http://HOST:PORT/v1")
    if not teacher.model:
        raise UserError(f"{TEACHER}.url={teacher.url} needs the name of a model; write {TEACHER}.model=NAME")
    if temperature != 1.0:
        raise UserError(
            f"generator.sampling_params.temperature={temperature} does not fit {TEACHER}.url, since a server gives the "
            f"log-probs of a prompt at temperature 1; set it to 1, or load the teacher here by {TEACHER}.path"
        )


def _without_rewards(cfg: DictConfig) -> None:
    if cfg.distillation.reward_weight:
        return
    method = method_of(cfg)
    if method.needs_critic:
        raise UserError(
            f"distillation.reward_weight=0 leaves the critic of algorithm.advantage_method="
            f"{cfg.algorithm.advantage_method} without effect; set algorithm.advantage_method=grpo"
        )
    if cfg.algorithm.kl_reward_coef:
        raise UserError(
            f"algorithm.kl_reward_coef={cfg.algorithm.kl_reward_coef} lowers rewards, which "
            "distillation.reward_weight=0 leaves out; set algorithm.kl_loss_coef instead"
        )
