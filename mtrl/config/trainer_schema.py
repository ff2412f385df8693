"""Settings of the training loop: optimiser, checkpoints, sharding and the size of micro-batches."""

from __future__ import annotations

from dataclasses import dataclass, field

from mtrl.config.field import number, one_of, setting
from mtrl.config.model_schema import NO_FLOAT16


@dataclass
class OptimizerConfig:
    lr: float = number(1e-6, above=0)
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = number(1e-8, above=0, why="with 0 a weight without a gradient becomes NaN")
    weight_decay: float = number(0.0, at_least=0)
    max_grad_norm: float = number(1.0, above=0, may_be_infinite=True)
    """Maximum norm of the whole gradient, which is scaled down to it; inf: no maximum."""
    schedule: str = one_of("constant", "linear", "cosine")
    warmup_steps: int = number(0, at_least=0)
    min_lr_ratio: float = number(0.0, at_least=0, at_most=1)
    offload: bool = False
    """Store the optimiser's moments in CPU memory between updates; for models on a GPU."""


@dataclass
class CheckpointConfig:
    every_steps: int = number(20, at_least=0)
    """Number of steps between checkpoints; 0: only at the end."""
    keep_last: int = number(2, at_least=1)
    keep_best: bool = True
    background: bool = True
    """Write checkpoints in the background, while training continues."""


@dataclass
class FsdpConfig:
    """Sharding of models over `torchrun`'s ranks (FSDP2, `fully_shard`): every rank holds a shard of each parameter."""

    param_dtype: str | None = one_of(None, "bfloat16", "float32", refused={"float16": NO_FLOAT16})
    """Dtype of forward and backward passes; the weights stay in model.dtype. Null: model.dtype for
    model=tiny, else bfloat16 where GPU or CPU multiply it."""
    reduce_dtype: str = one_of("float32", "bfloat16")
    """Dtype of the sum of gradients over ranks."""
    reshard_after_forward: bool = True
    """Free gathered weights after the forward pass and gather them again for the backward pass; false is faster and
    needs more memory."""
    cpu_offload: bool = False
    """Store parameters, gradients and moments in CPU memory."""
    replicas: int = number(1, at_least=1)
    """Hybrid sharding (HSDP): number of copies of the model, each sharded over ranks / replicas ranks."""
    timeout: float = number(600.0, above=0)
    """Maximum time that ranks wait for each other before the job ends, in seconds."""


@dataclass
class TrainerConfig:
    """The training loop."""

    max_steps: int = number(100, at_least=0)
    epochs: float | None = number(None, above=0)
    """Number of passes over the training rows. If set, it replaces `max_steps` by the smallest number of steps that
    draws each row that often. Rows that dynamic sampling and failed groups draw in addition are not counted.
    config.yaml of the run holds the number of steps."""
    prompts_per_step: int = number(16, at_least=1)
    mini_batches: int = number(1, at_least=1)
    """Number of optimiser updates per step of rollouts and per update epoch."""
    update_epochs: int = number(1, at_least=1)
    max_tokens_per_microbatch: int = number(16384, at_least=1)
    """Maximum number of tokens of one forward and backward pass, padding included. `model=tiny` sets 2048."""
    packing: bool | None = None
    """Concatenate the samples of a micro-batch in one row instead of padding each to the longest. With FlashAttention
    and sdpa each sample attends to itself only, and with sdpa a common prefix of 32 tokens or more, such as the prompt
    of a group, is computed once for all samples of a micro-batch; with eager, and for models with a sliding window, a
    mask of tokens x tokens separates the samples, which is slower than padding. Null: true for models other than
    model=tiny where sdpa computes no such mask."""
    threads: int | None = number(None, at_least=1, affects_policy=False)
    """Number of CPU threads; null: 1 for models under 5 M parameters, else all cores."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass instead of storing them."""
    recomputed_layers: int | None = number(None, at_least=1)
    """With trainer.gradient_checkpointing=true: number of layers, the first ones, whose activations are recomputed; the
    other layers store theirs, which saves their second forward pass. Null: all layers. `mtrl doctor --plan` and
    `--propose` name the smallest number that fits."""
    activation_offload: bool = False
    """With trainer.gradient_checkpointing=true: store the input of each recomputed layer in CPU memory between forward
    and backward pass; for models on a GPU."""
    max_logits_per_chunk: int | None = number(None, at_least=1)
    """Maximum number of logits (tokens x vocabulary) in memory at once; the log-probs of more tokens are computed in
    chunks. Null: 2^27 on a GPU, 2^24 on a CPU."""
    compile: bool = False
    """Apply torch.compile to each layer of the models that are trained, and to the functions that read logits."""
    sequence_parallel: int = number(1, at_least=1)
    """Number of ranks that share each sequence: each computes an equal part of its tokens, and in attention an equal
    part of the heads for all tokens (DeepSpeed-Ulysses). It must divide the number of ranks and that of the attention
    heads; 1: each rank computes whole sequences."""
    tensor_parallel: int = number(1, at_least=1)
    """Number of ranks that divide the matrices of each layer and compute the same tokens, by Transformers' plan for the
    model (`base_model_tp_plan`). It must divide the number of ranks and that of the heads of keys and values."""
    expert_parallel: int = number(1, at_least=1)
    """Number of ranks that divide the experts of each layer, by Transformers' plan for the model
    (`base_model_ep_plan`). It must be a multiple of trainer.tensor_parallel, and divide the number of ranks and that of
    the experts."""
    profile_step: int | None = number(None, at_least=1)
    """Step (from 1) whose trace, for Perfetto or chrome://tracing, is written to the folder of the run."""
    fsdp: FsdpConfig = field(default_factory=FsdpConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    checkpoint: CheckpointConfig = setting(factory=CheckpointConfig, affects_policy=False)
    max_steps_without_signal: int = number(20, at_least=1, affects_policy=False)
    """Maximum number of consecutive steps in which no group has an advantage; after them the run stops."""
    save_trajectories_every: int = number(10, at_least=0, affects_policy=False)
    """Number of steps between saved training trajectories; 0: never. Trajectories of evaluations are always saved."""
