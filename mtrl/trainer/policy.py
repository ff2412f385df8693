"""The model being trained, and the log-probs that it gives to sampled tokens."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from mtrl.distributed.sharding import (
    compute_device,
    full_state,
    is_sharded,
    load_state,
    named_tensors,
    plain_class,
    reshard,
)
from mtrl.models.logprobs import token_logprobs
from mtrl.trainer.batching import MicroBatch


class Policy:
    """A causal LM as the trainer uses it: plain, sharded over ranks, or with adapters that are trained in its place.

    Where it is sharded, all ranks call `logprobs`, `all_logprobs`, `weights` and `export` together.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        temperature: float = 1.0,
        entropy_gradient: bool = False,
        max_logits: int = 2**27,
    ):
        self.model, self.tokenizer, self.temperature = model, tokenizer, temperature
        self.entropy_gradient = entropy_gradient
        """Whether entropies are trained on; else they are numbers for the log and cost no graph."""
        self.max_logits = max_logits
        """Tokens x vocabulary whose logits are held at once."""

    @property
    def device(self) -> torch.device:
        """Where batches have to be; offloaded weights lie elsewhere."""
        return compute_device(self.model)

    @property
    def parameters(self) -> int:
        """Number of parameters, those of all ranks together."""
        return sum(p.numel() for p in self.model.parameters())

    @property
    def adapted(self) -> bool:
        """Whether adapters are trained, and the weights themselves are not."""
        return hasattr(self.model, "get_base_model")

    def logprobs(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Log-prob [N] of every sampled token at the sampling temperature, and entropy [N] of its distribution.

        Padding is on the right and attention is causal, so no real token sees it and no mask is needed; samples in
        one row are kept apart by their positions. Logits are computed at the sampled positions only, in float32 or
        better from what the head gives.
        """
        return token_logprobs(
            self.model,
            batch.action_mask,
            batch.targets,
            temperature=self.temperature,
            entropy_gradient=self.entropy_gradient,
            max_logits=self.max_logits,
            **batch.inputs,
            use_cache=False,
        )

    @torch.no_grad()
    def all_logprobs(self, batches: list[MicroBatch]) -> list[Tensor]:
        """Log-probs per micro-batch without gradients: the old policy's, or the reference's."""
        found = [self.logprobs(batch)[0] for batch in batches]
        reshard(self.model)
        return found

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint holds, tied weights once: DTensors where sharded, and with adapters nothing but them.

        Plain tensors are copies with storage of their own (the local engine lets weights share some).
        """
        tensors = named_tensors(self.model, trainable_only=self.adapted)
        return {name: value if isinstance(value, DTensor) else value.clone() for name, value in tensors.items()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Copy weights in place, so that the engine sees them too: those of `state()`, or whole ones on every rank.

        Raises:
            ValueError: names or shapes are not the model's; nothing was changed.
        """
        load_state(self.model, state, trainable_only=self.adapted)

    def weights(self) -> dict[str, Tensor] | None:
        """What an engine with weights of its own loads: whole copies of what `state` names, in the memory of the CPU of
        rank 0; None on the others."""
        return full_state(self.model, trainable_only=self.adapted)

    def export(self, folder: Path) -> None:
        """Let rank 0 write a Hugging Face folder; adapters are merged, and beside that in `adapter/` for themselves."""
        from mtrl.models.tiny import save

        if not is_sharded(self.model) and not self.adapted:
            save(self.model, self.tokenizer, folder)
            return
        state = full_state(self.model)
        if state is None:
            return
        save(self._plain(state), self.tokenizer, folder)
        if self.adapted:
            from mtrl.models.lora import save_adapter

            adapters = {name: state[name] for name in named_tensors(self.model, trainable_only=True)}
            save_adapter(self.model, folder / "adapter", adapters)

    def _plain(self, state: Mapping[str, Tensor]) -> Any:
        """The model with these whole weights, neither sharded nor with adapters; it cannot run."""
        model = self.model
        if self.adapted:
            from mtrl.models.lora import merged_state_of, scaling_of

            adapters = {name: state[name] for name in named_tensors(model, trainable_only=True)}
            state, model = merged_state_of(state, adapters, scaling_of(model)), model.get_base_model()
        with torch.device("meta"):
            plain = plain_class(model)(model.config)
        plain.load_state_dict(state, strict=False, assign=True)
        plain.tie_weights()
        plain.generation_config = model.generation_config
        return plain
