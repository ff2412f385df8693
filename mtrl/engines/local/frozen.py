"""An embedded engine whose weights never change: it takes a role of self-play that is not trained."""

from __future__ import annotations

from typing import Any

from mtrl.engines.base import SamplingParams
from mtrl.engines.local.engine import LocalEngine
from mtrl.types import Generation


class FrozenEngine:
    """See `mtrl.engines.base.TurnSampler`. It samples one turn at a time: the rows of a batch would depend on the time
    at which their environments answer, and with them the last bits of the log-probs, so that a resumed run could sample
    another token."""

    def __init__(self, model: Any, tokenizer: Any, max_context_length: int, fused_decode: bool = True):
        """
        Args:
            model: a causal language model of Hugging Face, which nothing else uses.
            max_context_length: maximum number of tokens of a whole conversation.
        """
        self._engine = LocalEngine(
            model, tokenizer, 1, max_context_length, fused_decode, deterministic=False, cuda_graphs=False
        )

    async def generate(self, trajectory_id: str, prompt: list[int], sampling: SamplingParams) -> Generation:
        """See `Sampler.generate`."""
        try:
            return await self._engine.generate(trajectory_id, prompt, sampling)
        finally:
            self._engine.release(trajectory_id)  # the next trajectory gets the only slot

    async def close(self) -> None:
        """End the engine and the turns that wait for it."""
        await self._engine.close()
