"""Checks of settings for scale and overlap: `placement.*`, `async_config.*`, `trainer.fsdp.*` and the ranks."""

from __future__ import annotations

from omegaconf import DictConfig

from mtrl.command.algorithm_checks import method_of
from mtrl.config.derived import overlaps, ranks, serves
from mtrl.errors import UserError


def check_scale(cfg: DictConfig) -> None:
    """Check the settings for scale and overlap.

    Raises:
        UserError: settings contradict each other.
    """
    name = cfg.placement.name
    if name is not None and name not in cfg.model.recipe:
        raise UserError(
            f"placement={name} takes its numbers from the model's own table, and model.path={cfg.model.path} has none "
            "for it; choose one of conf/model that has, such as model=qwen3_8b, or leave placement out"
        )
    if overlaps(cfg) and cfg.generator.local.deterministic and not serves(cfg):
        raise UserError(
            "generator.local.deterministic=true lets turns wait for each other, and async_config.max_steps_off_policy="
            f"{cfg.async_config.max_steps_off_policy} lets nothing wait; set generator.local.deterministic=null, or "
            "async_config.max_steps_off_policy=0"
        )
    replicas = cfg.trainer.fsdp.replicas
    if ranks() % replicas:
        raise UserError(
            f"trainer.fsdp.replicas={replicas} does not divide the number of ranks, {ranks()}; set it to 1, or let "
            "torchrun start a multiple of it"
        )
    _check_sequence_parallel(cfg)
    _check_model_parallel(cfg)
    if ranks() > 1 and cfg.model.device.startswith("cuda:"):
        raise UserError(
            f"model.device={cfg.model.device} puts all {ranks()} ranks on one GPU; write model.device=cuda, and each "
            "rank has its own"
        )


def _check_sequence_parallel(cfg: DictConfig) -> None:
    parts, attention = cfg.trainer.sequence_parallel, cfg.model.attn_implementation
    if ranks() % parts:
        raise UserError(
            f"trainer.sequence_parallel={parts} does not divide the number of ranks, {ranks()}; set it to 1, or let "
            "torchrun start a multiple of it"
        )
    if parts > 1 and attention != "sdpa":
        raise UserError(
            f"trainer.sequence_parallel={parts} works with model.attn_implementation=sdpa, and it is {attention}; set "
            "it to sdpa, or trainer.sequence_parallel=1"
        )
    if parts > 1 and cfg.algorithm.expert_balance_coef:
        raise UserError(
            f"algorithm.expert_balance_coef={cfg.algorithm.expert_balance_coef:g} does not work with "
            f"trainer.sequence_parallel={parts}, whose ranks see parts of the sequences; set one of them to its default"
        )
    if cfg.model.name == "tiny" and cfg.model.tiny.heads % parts:
        raise UserError(
            f"trainer.sequence_parallel={parts} does not divide model.tiny.heads={cfg.model.tiny.heads}; set the heads "
            f"to a multiple of {parts}, or trainer.sequence_parallel=1"
        )


def _check_model_parallel(cfg: DictConfig) -> None:
    """Check `trainer.tensor_parallel` and `trainer.expert_parallel`; a pretrained model's own sizes are checked when
    the run starts."""
    tensor, expert = cfg.trainer.tensor_parallel, cfg.trainer.expert_parallel
    each = ranks() // cfg.trainer.fsdp.replicas
    for key, number in {"tensor_parallel": tensor, "expert_parallel": expert}.items():
        if each % number:
            raise UserError(
                f"trainer.{key}={number} does not divide the number of ranks of a copy of the model, {each}; set it to "
                f"1, or let torchrun start a multiple of {number * cfg.trainer.fsdp.replicas}"
            )
        if number > 1:
            _check_beside(f"trainer.{key}", number, cfg)
    if expert > 1 and expert % tensor:
        raise UserError(
            f"trainer.expert_parallel={expert} is no multiple of trainer.tensor_parallel={tensor}; set it to a "
            "multiple, or to 1"
        )
    if cfg.model.name == "tiny" and expert > 1:
        raise UserError(f"trainer.expert_parallel={expert}: model=tiny has no experts; set trainer.expert_parallel=1")
    if cfg.model.name == "tiny" and cfg.model.tiny.heads % tensor:
        raise UserError(
            f"trainer.tensor_parallel={tensor} does not divide model.tiny.heads={cfg.model.tiny.heads}; set the heads "
            f"to a multiple of {tensor}, or trainer.tensor_parallel=1"
        )


def _check_beside(key: str, number: int, cfg: DictConfig) -> None:
    """Check that the other settings work with a model of which each rank has a part."""
    parts, method = cfg.trainer.sequence_parallel, method_of(cfg)
    others = {
        "trainer.sequence_parallel=1": parts > 1 and f"trainer.sequence_parallel={parts}",
        "trainer.compile=false": cfg.trainer.compile and "trainer.compile=true",
        "model.lora_rank=0": cfg.model.lora_rank and f"model.lora_rank={cfg.model.lora_rank}",
        "algorithm.advantage_method=turn_rloo": method.needs_critic and f"the critic of {method.name}",
    }
    for fix, other in others.items():
        if other:
            raise UserError(f"{key}={number} does not work with {other}; set {fix}, or {key}=1")
