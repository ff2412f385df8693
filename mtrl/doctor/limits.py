"""Checks of settings that a run or its servers would reject after they have loaded the model, made from its sizes
alone."""

from __future__ import annotations

from mtrl.config.schema import Config
from mtrl.doctor.architecture import Architecture
from mtrl.doctor.layout import MemoryLayout, teacher_of
from mtrl.errors import UserError


def check_limits(config: Config, model: Architecture) -> None:
    """Check the settings against the sizes of the model.

    Raises:
        UserError: conversations are longer than the model's context, an adapter target matches no layer, the adapter
            rank is too large, or heads or experts cannot be divided among the GPUs of a server or the ranks that share
            sequences, matrices or experts, or more layers are recomputed than there are.
    """
    wanted, holds = config.generator.max_context_length, model.max_position_embeddings
    if wanted is not None and wanted > holds:
        raise UserError(
            f"generator.max_context_length={wanted} is more than the {holds} tokens that the model holds; lower it"
        )
    recomputed, layers = config.trainer.recomputed_layers, model.num_hidden_layers
    if config.trainer.gradient_checkpointing and recomputed is not None and recomputed > layers:
        raise UserError(
            f"trainer.recomputed_layers={recomputed} is more than the model's {layers} layers; lower it, or set it to "
            "null for all layers"
        )
    if config.model.lora_rank:
        _check_adapters(config.model.lora_rank, config.model.lora_target_modules, model)
    _check_heads("trainer.sequence_parallel", config.trainer.sequence_parallel, model)
    for each in filter(None, (model, teacher_of(config))):
        _check_division(config.trainer.tensor_parallel, config.trainer.expert_parallel, each)
    servers = MemoryLayout.of(config).servers
    if servers is not None:
        key = f"generator.{config.generator.backend}.tensor_parallel_size"
        _check_heads(key, servers.tensor_parallel_size, model)
        _check_shared_heads(key, servers.tensor_parallel_size, model)


def _check_heads(key: str, parts: int, model: Architecture) -> None:
    if model.num_attention_heads % parts:
        sizes = ", ".join(str(size) for size in (1, 2, 4, 8) if not model.num_attention_heads % size)
        raise UserError(
            f"{key}={parts} does not divide the model's {model.num_attention_heads} attention heads; take one of "
            f"{sizes}"
        )


def _check_shared_heads(key: str, gpus: int, model: Architecture) -> None:
    """Check that the GPUs of a server can divide the heads of keys and values equally, or hold equally many copies of
    each: vLLM and SGLang end at other numbers after they have started."""
    heads = model.num_key_value_heads
    if heads % gpus and gpus % heads:
        sizes = ", ".join(
            str(size) for size in range(1, gpus) if not model.num_attention_heads % size and not heads % size
        )
        raise UserError(
            f"{key}={gpus} is neither a divisor nor a multiple of the model's {heads} heads of keys and values; take "
            f"one of {sizes}"
        )


def _check_division(tensor: int, expert: int, model: Architecture) -> None:
    """Check what `mtrl.distributed.plans` checks with the modules of the policy and the teacher."""
    if model.model_type != "gpt_oss" and model.num_key_value_heads % tensor:
        raise UserError(
            f"trainer.tensor_parallel={tensor} does not divide the model's {model.num_key_value_heads} heads of keys "
            f"and values; use a divisor of {model.num_key_value_heads}"
        )
    if expert > 1 and not model.num_local_experts:
        raise UserError(f"trainer.expert_parallel={expert}: a {model.model_type} model has no experts; set it to 1")
    if expert > 1 and model.num_local_experts % expert:
        raise UserError(
            f"trainer.expert_parallel={expert} does not divide the model's {model.num_local_experts} experts; use a "
            f"divisor of {model.num_local_experts}"
        )
    if tensor > 1 and expert == 1 and model.model_type == "qwen3_moe":
        raise UserError(
            f"trainer.tensor_parallel={tensor} divides the matrices of experts in a way that no checkpoint can hold; "
            f"set trainer.expert_parallel to a multiple of {tensor}, or trainer.tensor_parallel=1"
        )


def _check_adapters(rank: int, targets: list[str], model: Architecture) -> None:
    for target in targets:
        if not any(target.endswith(name) for name in model.linear):
            raise UserError(
                f"model.lora_target_modules={target} names no linear layer of {model.model_type}; there are "
                f"{', '.join(model.linear)}"
            )
    chosen = model.chosen(tuple(targets)).values()
    most = max(min(sizes) for sizes in chosen)
    if rank > most:
        raise UserError(
            f"model.lora_rank={rank} is more than the rank {most} of the matrices that it adapts; take at most {most}, "
            f"or model.lora_rank=0, which trains the matrices themselves"
        )
