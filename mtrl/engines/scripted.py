"""An engine with fixed responses instead of a model: it replays gold solutions, which validate an environment, and
scripts of tests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mtrl.engines.base import EngineStats, SamplingParams
from mtrl.types import FinishReason, Generation

Respond = Callable[[str, int], str]
"""`respond(trajectory_id, turn_index)` returns the text of a turn. `turn_index` starts at 0, and again after `open`."""


class ScriptedEngine:
    """See `mtrl.engines.base.Engine`. Responses end with the first stop token; their log-probs are 0.0."""

    def __init__(self, respond: Respond | Mapping[str, Sequence[str]], tokenizer: Any):
        self.respond = respond if callable(respond) else _from_lists(respond)
        self.tokenizer = tokenizer
        self.version = 0
        self.stats = EngineStats()
        self._turns: Counter[str] = Counter()

    def open(self, trajectory_id: str) -> None:
        self._turns[trajectory_id] = 0

    async def generate(self, trajectory_id: str, prompt: list[int], sampling: SamplingParams) -> Generation:
        text = self.respond(trajectory_id, self._turns[trajectory_id])
        self._turns[trajectory_id] += 1
        ids = [*self.tokenizer.encode(text, add_special_tokens=False), *sampling.stop_token_ids[:1]]
        finish = FinishReason.STOP if len(ids) <= sampling.max_generate_length else FinishReason.LENGTH
        ids = ids[: sampling.max_generate_length]
        self.stats.prompt_tokens += len(prompt)
        self.stats.sampled_tokens += len(ids)
        return Generation(ids, [0.0] * len(ids), finish, [(self.version, len(ids))] if ids else [])

    def release(self, trajectory_id: str) -> None:
        self._turns.pop(trajectory_id, None)

    async def load_weights(self, weights: Any, version: int) -> None:
        self.version = version

    async def close(self) -> None:
        """Do nothing: the engine runs nothing in the background."""


def _from_lists(lists: Mapping[str, Sequence[str]]) -> Respond:
    def respond(trajectory_id: str, turn_index: int) -> str:
        if trajectory_id not in lists:
            raise ValueError(f"there are no responses for the trajectory {trajectory_id}")
        responses = lists[trajectory_id]
        if turn_index >= len(responses):
            raise ValueError(
                f"{trajectory_id} has {len(responses)} responses, and its turn {turn_index + 1} needs one more"
            )
        return responses[turn_index]

    return respond
