"""Settings of the policy and of its warm start."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mtrl.config.field import number, one_of, setting

NO_FLOAT16 = "needs loss scaling, which mtrl does not have; set bfloat16"
"""Why weights and passes of training cannot be in float16."""


@dataclass
class WarmStartConfig:
    """Supervised fine-tuning on episodes of the environment's demonstrator, before the first training step. It ends as
    soon as the policy succeeds often enough for RL to learn from its own successes."""

    enabled: bool = False
    """Whether to make a warm start. `model=tiny` sets true, since its weights are random at first."""
    success_band: tuple[float, float] = (0.3, 0.5)
    """Lower and upper limit of the success rate. The warm start ends when the share of successes among sampled episodes
    on training rows is between them."""
    episodes: int = number(256, at_least=1)
    """Number of episodes that are sampled for each measurement of the success rate."""
    min_turns: int = number(1, at_least=1)
    """Minimum number of turns of an episode that counts as a success. Set the number of turns that a solution needs
    where an answer can be guessed in fewer: RL from guesses alone strengthens guessing."""
    check_every: int = number(50, at_least=1)
    """Number of updates between two measurements."""
    min_steps: int = number(0, at_least=0)
    """Number of updates before the first measurement. Skills that the success rate hardly shows, such as spelling,
    still improve inside the band. A warm start takes fewer updates only if this number leads above the band."""
    max_steps: int = number(1000, at_least=1)
    """Maximum number of updates. If the success rate is still outside the band, the run ends with an error that names
    the settings to change."""
    demonstrations: int = number(4096, at_least=1)
    """Number of different episodes of the demonstrator."""
    batch_size: int = number(32, at_least=1)
    """Number of episodes in one update."""
    lr: float = number(1e-5, above=0)
    """Learning rate of AdamW."""
    muon_lr: float | None = number(None, above=0)
    """Learning rate of Muon for the matrices between embedding and head; null: AdamW for all."""
    warmup_steps: int = number(20, at_least=0)
    ema_decay: float = number(0.95, at_least=0, below=1)
    """Decay of the exponential moving average of the weights over the updates, which becomes the policy; 0: the last
    weights."""


@dataclass
class TinyConfig:
    """Sizes of the tiny policy, a model of the Qwen3 architecture."""

    hidden_size: int = number(128, at_least=2)
    intermediate_size: int = number(192, at_least=1)
    layers: int = number(2, at_least=1)
    heads: int = number(4, at_least=1)
    vocabulary: int = number(512, at_least=262, why="256 bytes and 6 special tokens are always in it")
    """Maximum size of the vocabulary, in tokens; the tokenizer is trained on the demonstrations."""
    context: int = number(1024, at_least=1)
    """Maximum length of a conversation, in tokens."""
    init_std: float = number(0.1, above=0)
    """Standard deviation of the random weights."""
    vision_layers: int = number(0, at_least=0)
    """Number of layers of a vision tower, with which the policy reads images (Qwen3-VL architecture); 0: text only."""


@dataclass
class ModelConfig:
    """The policy."""

    name: str = one_of("tiny", "hf")
    """tiny: built, warm-started and cached on this machine; hf: any Hugging Face causal LM."""
    path: str | None = None
    """model=hf: model folder, Hub name or GGUF file; PACKAGE/FILE.gguf names a file of an installed Python package."""
    dtype: str = one_of("float32", "bfloat16", refused=dict.fromkeys(("float16", "fp16"), NO_FLOAT16))
    """Dtype of the weights."""
    device: str = setting("auto", affects_policy=False)
    """auto | cpu | cuda | cuda:N. auto: cuda if the machine has a GPU (an error if PyTorch cannot use it), else cpu"""
    attn_implementation: str = one_of("sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention")
    renderer: str = "auto"
    """Renderer that turns messages into tokens: auto, or a name of the `renderers` package."""
    trust_remote_code: bool = False
    freeze_vision: bool = True
    """Whether the vision tower of a model that reads images keeps its weights in training. The warm start of the tiny
    policy trains it in any case, since its weights are random at first."""
    lora_rank: int = number(0, at_least=0)
    """Rank of low-rank adapters (LoRA), which are trained instead of the weights; 0: train the weights."""
    lora_alpha: int = number(16, at_least=1)
    """Numerator of the scale of the adapters' product, lora_alpha / lora_rank."""
    lora_target_modules: list[str] = field(default_factory=list)
    """Names of the linear layers that get adapters; empty: all linear layers except the head."""
    recipe: dict[str, Any] = field(default_factory=dict)
    """Data from the file of a model in conf/model: `path` and `lr`, which override those of an experiment, and for each
    placement, by its name, the settings for this model (conf/placement/shared/from_model.yaml lists the keys)."""
    tiny: TinyConfig = field(default_factory=TinyConfig)
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)
