"""The model being trained, and the log-probs that it gives to sampled tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mtrl.models.logits import logits_at
from mtrl.trainer.batching import MicroBatch


class Policy:
    """A causal LM as the trainer uses it. Forwards go through the root module, as FSDP2 (`fully_shard`) needs."""

    def __init__(self, model: Any, tokenizer: Any, temperature: float = 1.0, entropy_gradient: bool = False):
        self.model, self.tokenizer, self.temperature = model, tokenizer, temperature
        self.entropy_gradient = entropy_gradient
        """Whether entropies are trained on; else they are numbers for the log and cost no graph."""

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return sum(p.numel() for p in self.model.parameters())

    def logprobs(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Log-prob [N] of every sampled token at the sampling temperature, and entropy [N] of its distribution.

        Padding is on the right and attention is causal, so no real token sees it and no mask is needed; samples in
        one row are kept apart by their positions. Logits are computed at the sampled positions only.
        """
        logits = logits_at(self.model, batch.action_mask, **batch.inputs, use_cache=False)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.temperature not in (0.0, 1.0):
            logits = logits / self.temperature
        normaliser = torch.logsumexp(logits, -1)
        logprobs = logits.gather(-1, batch.targets[:, None]).squeeze(-1) - normaliser
        with torch.set_grad_enabled(self.entropy_gradient and torch.is_grad_enabled()):
            entropy = normaliser - (logits.softmax(-1) * logits).sum(-1)
        return logprobs, entropy

    @torch.no_grad()
    def all_logprobs(self, batches: list[MicroBatch]) -> list[Tensor]:
        """Log-probs per micro-batch without gradients: the old policy's, or the reference's."""
        return [self.logprobs(batch)[0] for batch in batches]

    def state(self) -> dict[str, Tensor]:
        """The weights, each with storage of its own (the local engine lets some share), tied ones once."""
        state = {name: value.detach().clone() for name, value in self.model.state_dict().items()}
        for tied in getattr(self.model, "_tied_weights_keys", None) or ():
            if getattr(self.model.config, "tie_word_embeddings", False):
                state.pop(tied, None)
        return state

    def load(self, state: dict[str, Tensor]) -> None:
        """Copy weights in place, so that the engine sees them too."""
        missing, unexpected = self.model.load_state_dict(state, strict=False)
        tied = set(getattr(self.model, "_tied_weights_keys", None) or ())
        if set(missing) - tied or unexpected:
            raise ValueError(
                f"weights do not fit the model: missing {sorted(set(missing) - tied)}, unexpected {unexpected}"
            )

    def export(self, folder: Path) -> None:
        """Write a Hugging Face folder."""
        from mtrl.models.tiny import save

        save(self.model, self.tokenizer, folder)
