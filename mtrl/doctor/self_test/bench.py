"""The model and the sizes of a self-test. This module does not import torch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from mtrl.config.overrides import quoted

if TYPE_CHECKING:
    from mtrl.config.schema import Config


@dataclass(frozen=True)
class Sizes:
    """The amount of work of the cases."""

    shapes: str | tuple[int, int, int]
    """Shapes of the random model: a name of `architectures.yaml`, or vocabulary, width and layers of a small Qwen3."""
    samples: int
    """Number of samples of an update."""
    sample_tokens: int
    """Mean length of a sample, in tokens."""
    micro_batch_tokens: int
    """`trainer.max_tokens_per_microbatch` of all cases but the one that compares several."""
    micro_batches: tuple[int, ...]
    """Values of `trainer.max_tokens_per_microbatch` that are compared."""
    trajectories: int
    """Number of turns that are sampled at once."""
    turn_tokens: int
    """Number of tokens of a prompt, and of a sampled turn."""
    seconds: float = 1.0
    """Minimum duration of a measurement of updates."""

    @property
    def context(self) -> int:
        """Maximum length of a conversation, in tokens."""
        return max(2 * self.sample_tokens, 2 * self.turn_tokens)


GPU = Sizes("Qwen/Qwen3-0.6B", 64, 512, 16384, (4096, 8192, 16384, 32768), 64, 256)
CPU = Sizes((4096, 256, 4), 24, 128, 1024, (512, 1024, 2048), 16, 64)
QUICK = Sizes((512, 64, 2), 8, 48, 256, (128, 256), 4, 16, seconds=0.1)


@dataclass(frozen=True)
class Bench:
    """The model, the sizes and the devices of a self-test. A child process receives it as JSON."""

    model: str
    """Folder of the model; the first case writes it, unless the user gave one."""
    sizes: Sizes
    gpus: int
    """Number of GPUs that PyTorch can use; 0: the cases run on the CPU."""
    scratch: str
    """Folder for files of a case, which is removed afterwards."""

    @property
    def on_gpu(self) -> bool:
        return self.gpus > 0

    @property
    def half(self) -> str:
        """Override for mixed precision: float32 weights, and bfloat16 in forward and backward passes."""
        return "trainer.fsdp.param_dtype=bfloat16"

    def config(self, *overrides: str) -> Config:
        """Return the checked configuration of a training run with this model and these sizes.

        Raises:
            UserError: the configuration is invalid, or a setting cannot be used on this machine.
        """
        from omegaconf import OmegaConf

        from mtrl.command.compose import compose

        sizes = self.sizes
        own = (
            "model=hf",
            quoted("model.path", self.model),
            quoted("run_dir", str(Path(self.scratch) / "run")),
            "generator=local",
            "generator.local.process=false",
            f"generator.max_num_seqs={sizes.trajectories}",
            f"generator.max_context_length={sizes.context}",
            f"generator.sampling_params.max_generate_length={sizes.turn_tokens}",
            "trainer.packing=true",
            f"trainer.gradient_checkpointing={str(self.on_gpu).lower()}",  # so that GPUs of 24 GB suffice
            f"trainer.max_tokens_per_microbatch={sizes.micro_batch_tokens}",
            "trainer.optimizer.lr=1e-4",
        )
        return cast("Config", OmegaConf.to_object(compose([*own, *overrides])))

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Bench:
        fields: dict[str, Any] = json.loads(text)
        sizes: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in fields["sizes"].items()
        }
        return cls(**{**fields, "sizes": Sizes(**sizes)})
