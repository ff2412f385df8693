"""Changes of a configuration after which a run needs less memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from operator import attrgetter
from typing import Any

from mtrl.config.schema import Config
from mtrl.doctor.architecture import Architecture
from mtrl.doctor.layout import can_share_sequences, ranks_here, recomputed_layers

Change = dict[str, Any]
"""Values by the key of the configuration."""


def apply(config: Config, change: Change) -> None:
    """Set the values of a change in a configuration."""
    for key, value in change.items():
        section, _, name = key.rpartition(".")
        setattr(attrgetter(section)(config), name, value)


def recomputing(cfg: Config, count: int, model: Architecture) -> Change:
    """Return the change after which `count` layers are recomputed. It names only settings that the change alters."""
    key, number = "trainer.gradient_checkpointing", "trainer.recomputed_layers"
    wanted: Change = {key: count > 0, number: None if count in (0, model.num_hidden_layers) else count}
    return {name: value for name, value in wanted.items() if attrgetter(name)(cfg) != value}


def possible_changes(cfg: Config, model: Architecture) -> Iterator[Change]:
    """Yield the changes that the run would take, whether it then fits or not. Those with the least effect on the run
    come first."""
    engine = f"generator.{cfg.generator.backend}"
    trainer, full = cfg.trainer, not cfg.model.lora_rank
    context = cfg.generator.max_context_length or model.max_position_embeddings
    yield from _more_recomputation(cfg, model)
    if trainer.max_tokens_per_microbatch > context:
        yield {"trainer.max_tokens_per_microbatch": context}
    if trainer.fsdp.param_dtype == "float32":
        yield {"trainer.fsdp.param_dtype": "bfloat16"}
    here, machines = ranks_here(cfg.placement), cfg.placement.machines
    divided_among = max(trainer.tensor_parallel, trainer.expert_parallel)
    is_divided = divided_among > 1
    for parts in (2, 4, 8):
        divides = not model.num_attention_heads % parts and not here * machines % parts
        if parts > trainer.sequence_parallel and divides and can_share_sequences(cfg) and not is_divided:
            yield {"trainer.sequence_parallel": parts}
    if cfg.generator.backend == "local":
        for sequences in (64, 32, 16, 8):
            yield {"generator.max_num_seqs": sequences}
    else:
        for share in (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3):
            yield {"generator.gpu_memory_utilization": share}
        for size in (2, 4, 8):
            if not model.num_attention_heads % size:
                yield {f"{engine}.tensor_parallel_size": size}
    if not trainer.activation_offload:
        yield {**recomputing(cfg, model.num_hidden_layers, model), "trainer.activation_offload": True}
    if not trainer.optimizer.offload:
        yield {"trainer.optimizer.offload": True}
    answers = (cfg.generator.sampling_params, cfg.generator.eval_sampling_params)
    longest = max(sampling.max_generate_length for sampling in answers if sampling is not None)
    for length in (16384, 8192, 4096):
        if longest < length < context:
            tokens = min(length, trainer.max_tokens_per_microbatch)
            yield {"generator.max_context_length": length, "trainer.max_tokens_per_microbatch": tokens}
    if full and not is_divided:
        adapters = {"model.lora_rank": 64, "model.lora_alpha": 128, "model.dtype": "bfloat16"}
        yield {**adapters, "trainer.optimizer.lr": max(1e-5, trainer.optimizer.lr)}
    if not trainer.fsdp.cpu_offload:
        yield {"trainer.fsdp.cpu_offload": True}
    divisor = math.lcm(trainer.fsdp.replicas * divided_among, trainer.sequence_parallel)
    for ranks in (2, 4, 8):
        if ranks > here and not ranks * machines % divisor:
            yield {"placement.ranks": ranks}
    for ranks in (2, 4, 8):
        if machines == 1 and ranks >= here and not 2 * ranks % divisor:
            yield {"placement.machines": 2, "placement.ranks": ranks}


def _more_recomputation(cfg: Config, model: Architecture) -> Iterator[Change]:
    """Yield the changes after which more layers are recomputed, the fewest first, and all of them at last."""
    for count in range(recomputed_layers(cfg, model) + 1, model.num_hidden_layers + 1):
        yield recomputing(cfg, count, model)
