"""Settings of the policy and of its warm start."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class WarmStartConfig:
    """Supervised fine-tuning on the episodes of the environment's demonstrator, before the first training step, until
    the policy succeeds often enough for RL to learn from its own successes, and no longer."""

    enabled: bool = False
    """`model=tiny` sets true: its weights are random before."""
    success_band: tuple[float, float] = (0.3, 0.5)
    """The warm start ends when the share of successes among sampled episodes on training rows is between these two."""
    episodes: int = 256
    """Episodes that are sampled for each measurement of that share."""
    check_every: int = 50
    """Updates between two measurements."""
    min_steps: int = 0
    """Updates before the first measurement: what the share hardly shows, such as spelling, goes on improving inside the
    band. A warm start takes fewer only where they lead above the band."""
    max_steps: int = 1000
    """Updates after which a share below the band ends the run, with what to change."""
    demonstrations: int = 4096
    """Different episodes of the demonstrator."""
    batch_size: int = 32
    """Episodes of one update."""
    lr: float = 1e-5
    """Learning rate of AdamW."""
    muon_lr: float | None = None
    """Learning rate of Muon for the matrices between embedding and head; null: AdamW for all."""
    warmup_steps: int = 20
    ema_decay: float = 0.95
    """The policy is the exponential moving average of the weights over the updates, with this decay; 0: the last
    weights."""


@dataclass
class TinyConfig:
    """Sizes of the tiny policy, a Qwen3."""

    hidden_size: int = 128
    intermediate_size: int = 192
    layers: int = 2
    heads: int = 4
    vocabulary: int = 512
    """Tokens at most; the tokenizer is made from the demonstrations."""
    context: int = 1024
    """Tokens of the longest conversation."""
    init_std: float = 0.1
    """Standard deviation of the random weights."""


@dataclass
class ModelConfig:
    """The policy."""

    name: str = "tiny"
    """tiny: built, warm-started and cached on this machine; hf: any Hugging Face causal LM."""
    path: str | None = None
    """model=hf: a folder or a Hub name."""
    dtype: str = "float32"
    """float32 | bfloat16 | float16"""
    device: str = "auto"
    """auto | cpu | cuda | cuda:N"""
    attn_implementation: str = "sdpa"
    """sdpa | eager | flash_attention_2 | flash_attention_3 | flex_attention"""
    renderer: str = "auto"
    """Chat template to tokens: auto, or a name of the `renderers` package."""
    trust_remote_code: bool = False
    lora_rank: int = 0
    """Train low-rank adapters (LoRA) of this rank instead of the weights; 0: the weights."""
    lora_alpha: int = 16
    """The adapters' product counts lora_alpha / lora_rank times."""
    lora_target_modules: list[str] = field(default_factory=list)
    """Names of the linear layers that get adapters; empty: all of them but the head."""
    recipe: dict[str, Any] = field(default_factory=dict)
    """What the file of a model in conf/model says of it: `path`, which an experiment's own yields to, and by the name
    of a placement what that takes (conf/placement/shared/from_model.yaml has the keys)."""
    tiny: TinyConfig = field(default_factory=TinyConfig)
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)
